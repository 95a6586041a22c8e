"""How many tokens to draft: measured acceptance, measured costs, bounded loss."""
