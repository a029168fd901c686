"""Files of a store: read, written, checked and pruned, all through `fs`."""
