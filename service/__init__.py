"""What runs in, or beside, the process that decodes."""
