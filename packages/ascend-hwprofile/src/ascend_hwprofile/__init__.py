"""Hardware profiles of Huawei Ascend NPUs: what a SoC is, what it can do, and why not."""
