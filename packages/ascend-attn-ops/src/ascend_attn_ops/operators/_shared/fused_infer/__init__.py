"""What both versions of fused_infer_attention_score share: rules, outputs, host computation."""
