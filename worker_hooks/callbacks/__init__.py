"""The callback protocol; monitors; exit on request; files that hold a model alone."""
