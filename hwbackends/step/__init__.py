"""What every state family shares once per step: batch, metadata, pool, slots, translation, sidecar, argument checks."""
