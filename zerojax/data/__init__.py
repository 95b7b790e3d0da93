"""From a dataset's name to token batches. This module only names the package: source, tokenizer, batches."""
