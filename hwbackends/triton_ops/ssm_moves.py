"""What happens to SSM states between steps, over Triton kernels: the state of a request at a position into a slot, and
what the speculative commit leaves to do. One launch per named state, all layers in it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hwbackends.ssm import checks
from hwbackends.ssm.state import SSMStorage
from hwbackends.step.pool import StatePool
from hwbackends.triton_ops.conv import check_device
from hwbackends.triton_ops.kernels_ssm import ssm_materialize_kernel
from hwbackends.triton_ops.launch import Launch, cdiv, ordered
from hwbackends.triton_ops.plans import Launches, Plans, changed, held, planned
from hwbackends.triton_ops.ssm import KIND_CODES, LAYOUT_CODES, lanes_of
from hwbackends.triton_ops.traits import Traits, TraitsOf


def materialize(
    traits_of: TraitsOf,
    pool: StatePool,
    req_pool_indices: Tensor,
    computed_lens: Tensor,
    destination_indices: Tensor | None,
) -> None:
    """The state of requests at a position into slots. See `hookspecs.materialize_slots`."""
    given = (req_pool_indices, computed_lens, destination_indices)
    checks.materialize(pool, *given)
    key = (checks.MATERIALIZE, *(None if t is None else (t.dtype, t.shape) for t in given))
    plans, holds = planned(pool, key), held(pool)
    if plans.held != holds:
        traits, count = traits_of(pool.device), req_pool_indices.shape[0]
        check_device(checks.MATERIALIZE, "pool", pool.device, traits)
        storages = [storage for storage in pool.states.values() if isinstance(storage, SSMStorage)]
        launches = [moving(traits, pool, one, count, destination_indices is None, steps=False) for one in storages]
        plans = pool.cache[key] = Plans(holds, launches)
    move(plans.launches, pool, req_pool_indices, computed_lens, destination_indices, None)


def move(
    launches: Launches,
    pool: StatePool,
    requests: Tensor,
    lengths: Tensor,
    destinations: Tensor | None,
    steps: Tensor | None,
) -> None:
    """Launch what `moving` made ready, for these requests."""
    mapping = pool.mamba_index_mapping.contiguous()
    table = mapping if pool.mamba_v2p_table is None else pool.mamba_v2p_table.contiguous()
    rest = (requests if t is None else t.contiguous() for t in (lengths, destinations, steps))
    tensors = [requests.contiguous(), mapping, table, *rest]
    for launch, storages in launches:
        launch([*storages, *tensors])
        changed(launch)


def moving(
    traits: Traits, pool: StatePool, storage: SSMStorage, count: int, own: bool, steps: bool
) -> tuple[Launch, tuple[Tensor, ...]]:
    """The launch that brings `count` requests' states into their own slots or others; `steps`: behind a draft step."""
    state, table = storage.layer(0), pool.mamba_v2p_table
    shape = traits.tuning.ssm(state, count * pool.num_layers, 1, True)
    held_by_request = (storage.ring_k, storage.ring_u, storage.ring_d)
    options: dict[str, Any] = {
        "KIND": KIND_CODES[storage.kind],
        "LAYOUT": LAYOUT_CODES[storage.layout],
        "LAYERS": pool.num_layers,
        "N": max(1, storage.draft_token_num),
        "H": storage.num_k_heads,
        "HV": state.num_v_heads,
        "K": state.head_k_dim,
        "V": state.head_v_dim,
        "C": max(1, state.ring_rows),
        "SL": storage.tensor.stride(0),
        "SS": storage.tensor.stride(1),
        "V2P": table is not None,
        "OWN": own,
        "STEPS": steps,
    }
    for part, tensor in zip("KUD", held_by_request, strict=True):
        options |= {f"SL{part}": 0 if tensor is None else tensor.stride(0)}
        options |= {f"SR{part}": 0 if tensor is None else tensor.stride(1)}
    lens, ring = storage.state_lens, storage.ring_u
    options |= {"SLL": 0 if lens is None else lens.stride(0)}
    constants = ordered(ssm_materialize_kernel, options | lanes_of(state, traits) | shape.constants())
    scalars = [pool.request_rows, 0 if table is None else table.shape[0], pool.num_slots]
    scalars += [0 if ring is None else ring.shape[1]]
    grid = count * pool.num_layers * state.num_v_heads * cdiv(state.head_v_dim, shape.rows)
    launch = Launch(traits, ssm_materialize_kernel, grid, scalars, constants, shape.warps)
    tensors = (storage.tensor, *held_by_request, lens)
    return launch, tuple(storage.tensor if tensor is None else tensor for tensor in tensors)
