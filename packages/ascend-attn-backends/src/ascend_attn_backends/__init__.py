"""Attention backends for Ascend NPUs with a selection that explains itself."""
