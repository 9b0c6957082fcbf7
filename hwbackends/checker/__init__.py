"""The static checker of hook signatures, ``hwbackends check``. It reads source and imports nothing of the runtime."""
