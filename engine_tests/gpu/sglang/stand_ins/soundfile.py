"""Stand-in: SGLang's server imports it for audio, which no run here has."""
