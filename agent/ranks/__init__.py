"""Values about ranks that are never changed: a new one shares most memory with the old one."""
