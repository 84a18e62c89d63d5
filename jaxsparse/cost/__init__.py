"""All systems with settings that can be compared."""
