"""A checkpoint folder on disk: format, checksums, manifest, commit, search, retention."""
