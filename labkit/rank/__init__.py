"""What a rank's process does, from its start to its end."""
