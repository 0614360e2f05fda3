"""The reward `code`: the program in a response, and its tests, in sandboxes."""
