"""A small language model trained over a slow link, to see what 6-bit gradients change and what they do not."""
