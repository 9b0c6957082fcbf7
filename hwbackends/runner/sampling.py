"""How the tokens of one request are chosen: through Transformers' own `GenerationConfig`, logits processors and
stopping criteria. Where the config asks for nothing but the greatest logit, a request has no sampler, and the step's
argmax is its token.

Drafts are checked by the same rule: each token is drawn from the target's distribution, and a draft is kept where it is
the token that was drawn. For drafts that are fixed tokens this is the rejection rule: a draft x is kept with
probability p(x), and where it is not, what was drawn has the distribution of p without x. So drafts change neither the
distribution nor, for one seed, the draws."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hwbackends.errors import ArgumentError, UnsupportedError
from hwbackends.runner.requests import token_ids, whole

if TYPE_CHECKING:
    from hwbackends.runner.requests import Request

HOOK = "PackedRunner.add"
MODES = ("greedy_search", "sample")
DEFAULT_NEW_TOKENS = 20
"""What `generate` gives where nothing says how many."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How one request's tokens are chosen and when it ends."""

    max_new_tokens: int
    eos_token_ids: frozenset[int]
    sampler: Sampler | None


@dataclass(frozen=True, slots=True)
class Asked:
    """What `add` was given to choose tokens by.

    Attributes:
        generation_config: a `GenerationConfig`; None: the model's.
        max_new_tokens: None: the config's.
        eos_token_ids: None: the config's.
        seed: of the draws; None: from torch's own generator.
        logits_processor: processors of the caller's, behind those of the config.
        stopping_criteria: criteria of the caller's.
        tokenizer: what `stop_strings` need.
        options: fields of the config to change.
    """

    generation_config: Any
    max_new_tokens: int | None
    eos_token_ids: Sequence[int] | None
    seed: int | None
    logits_processor: Sequence[Any]
    stopping_criteria: Sequence[Any]
    tokenizer: Any
    options: dict[str, Any]


def choose_by(model: Any, prompt: Sequence[int], asked: Asked) -> Choice:
    """What a request's config comes to: `generate` would read it the same way.

    Raises:
        ArgumentError: an option that `GenerationConfig` does not know, or of another kind.
        UnsupportedError: beams, several sequences, guidance, or assistants.
    """
    options = dict(asked.options)
    if asked.max_new_tokens is not None:
        options["max_new_tokens"] = whole(HOOK, "max_new_tokens", asked.max_new_tokens, 1)
    if asked.eos_token_ids is not None:
        found = token_ids(HOOK, "eos_token_ids", asked.eos_token_ids, model.config.get_text_config().vocab_size)
        options["eos_token_id"] = found or None
    config = _prepare(model, asked.generation_config, options)
    _refuse(config)
    length = _length(model, asked.generation_config, config, options, len(prompt))
    config.max_length = len(prompt) + length
    if config.min_new_tokens is not None:
        config.min_length = len(prompt) + config.min_new_tokens
    device = next(model.parameters()).device
    model._prepare_special_tokens(config, True, device=device)
    try:
        processors = _processors(model, config, prompt, asked, device)
        criteria = _criteria(model, config, asked)
    except (TypeError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(HOOK, "generation_config", str(error), "one that generate takes") from error
    ends = config._eos_token_tensor
    eos = frozenset() if ends is None else frozenset(ends.flatten().tolist())
    sampler = None
    if config.do_sample or processors or criteria:
        sampler = Sampler(processors, criteria, bool(config.do_sample), asked.seed, device)
    return Choice(length, eos, sampler)


def _prepare(model: Any, given: Any, options: dict[str, Any]) -> Any:
    import transformers

    if given is not None and not isinstance(given, transformers.GenerationConfig):
        raise ArgumentError(HOOK, "generation_config", type(given).__name__, "a GenerationConfig, or None")
    known: Any = transformers.GenerationConfig()  # type: ignore[no-untyped-call]
    if unknown := sorted(name for name in options if not hasattr(known, name)):
        wanted = "fields of GenerationConfig"
        raise ArgumentError(HOOK, "options", ", ".join(unknown), wanted)
    try:
        config, _ = model._prepare_generation_config(given if given is None else copy.deepcopy(given))
        config.update(**options)
        config.validate()
    except ValueError as error:
        raise ArgumentError(HOOK, "generation_config", str(error), "one that generate takes") from error
    return config


def _refuse(config: Any) -> None:
    mode = str(getattr(config.get_generation_mode(), "value", ""))
    if mode not in MODES:
        hint = "drafts come from PackedRunner(drafter=...), beams from model.generate"
        raise UnsupportedError(HOOK, "generation_config", mode.replace("_", " "), "greedy search or sampling", hint)
    if (config.num_return_sequences or 1) > 1:
        hint = "PackedRunner.add_n(prompt, n) gives one request for each"
        raise UnsupportedError(HOOK, "num_return_sequences", config.num_return_sequences, "1", hint)
    if config.guidance_scale not in (None, 1, 1.0):
        raise UnsupportedError(HOOK, "guidance_scale", config.guidance_scale, "None", "use model.generate")


def _length(model: Any, given: Any, config: Any, options: dict[str, Any], prompt: int) -> int:
    """New tokens, at most, as `generate` counts them."""
    if config.max_new_tokens is not None:
        return whole(HOOK, "max_new_tokens", config.max_new_tokens, 1)
    sources = [options.get("max_length"), getattr(given, "max_length", None), model.generation_config.max_length]
    longest = next((length for length in sources if length is not None), None)
    if longest is None:
        return DEFAULT_NEW_TOKENS
    if longest <= prompt:
        wanted = f"more than the prompt's {prompt} tokens"
        raise ArgumentError(HOOK, "max_length", longest, wanted, "give max_new_tokens")
    return int(longest) - prompt


def _processors(model: Any, config: Any, prompt: Sequence[int], asked: Asked, device: torch.device) -> list[Any]:
    from transformers import LogitsProcessorList

    found = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=len(prompt),
        encoder_input_ids=torch.tensor([list(prompt)], device=device),
        prefix_allowed_tokens_fn=None,
        logits_processor=LogitsProcessorList(asked.logits_processor),
        device=str(device),
        model_kwargs={},
    )
    return list(found)


def _criteria(model: Any, config: Any, asked: Asked) -> list[Any]:
    """Criteria beyond the length and the end tokens, which the request knows itself."""
    from transformers import StoppingCriteriaList
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

    if config.stop_strings is not None and asked.tokenizer is None:
        raise ArgumentError(HOOK, "tokenizer", None, "the model's tokenizer, which stop_strings need")
    found = model._get_stopping_criteria(
        generation_config=config,
        stopping_criteria=StoppingCriteriaList(asked.stopping_criteria),
        tokenizer=asked.tokenizer,
    )
    return [criterion for criterion in found if not isinstance(criterion, EosTokenCriteria | MaxLengthCriteria)]


class Sampler:
    """Chooses the tokens of one request.

    Args:
        processors: logits processors, in order.
        criteria: stopping criteria beyond length and end tokens.
        draws: whether tokens are drawn; else the greatest score is taken.
        seed: of the draws.
        device: of the logits.
    """

    def __init__(
        self, processors: list[Any], criteria: list[Any], draws: bool, seed: int | None, device: torch.device
    ) -> None:
        self._processors, self._criteria, self._device = processors, criteria, device
        self._generator = torch.Generator(device) if draws else None
        if self._generator is not None:
            chosen = int(torch.randint(2**62, (1,)).item()) if seed is None else whole(HOOK, "seed", seed)
            self._generator.manual_seed(chosen)
        # a draw whose token never reached the request is drawn again: a step may be interrupted at any place
        self._drawn, self._before = -1, torch.empty(0)

    @property
    def plain(self) -> bool:
        """Whether the greatest logit is the token: only its criteria are asked."""
        return self._generator is None and not self._processors

    def choose(self, request: Request, logits: Tensor) -> int:
        """The next token of a request from its logits [vocabulary].

        Raises:
            ArgumentError: nothing can be drawn: the scores hold NaN or infinity.
        """
        scores = logits[None].to(torch.float32, copy=True)
        if self._processors:
            ids = torch.tensor([request.tokens], device=scores.device)
            for processor in self._processors:
                scores = processor(ids, scores)
        if self._generator is None:
            return int(scores.argmax(dim=-1).item())
        weights = scores.softmax(dim=-1)
        if not bool(weights.isfinite().all()):
            raise ArgumentError("PackedRunner.step", "logits", "NaN or infinity", "numbers to draw from")
        return int(torch.multinomial(weights, 1, generator=self._rewind(len(request.generated))).item())

    def _rewind(self, index: int) -> torch.Generator:
        """The generator as it stands before the draw of token `index`."""
        assert self._generator is not None
        if self._drawn == index:
            self._generator.set_state(self._before)
        else:
            self._drawn, self._before = index, self._generator.get_state()
        return self._generator

    def stops(self, request: Request) -> bool:
        """Whether a criterion ends the answer after its newest token."""
        if not self._criteria:
            return False
        ids = torch.tensor([request.tokens], device=self._device)
        return any(bool(torch.as_tensor(criterion(ids, None)).any()) for criterion in self._criteria)
