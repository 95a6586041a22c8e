"""One folder per operator: arguments, contract data, rules, outputs, providers, samples."""
