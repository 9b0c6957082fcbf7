"""From an installed plugin to a bound backend: manifests, candidates, selection, binding, origins, and the scaffold
of a new one."""
