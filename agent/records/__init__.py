"""What a run writes and others read: record, folder, journal, logs, notes."""
