"""What several operators have in common."""
