"""Makes the tiny glm_moe_dsa with its MTP layer that tests and demos run (see train.py)."""
