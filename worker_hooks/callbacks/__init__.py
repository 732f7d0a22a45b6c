"""What a callback is; monitors; the request to exit; files of a model alone."""
