"""Other projects' kernels, loaded from where the user has them; nothing of theirs is copied here."""
