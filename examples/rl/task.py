"""The task, and the policy gradient that learns it.

The task is to sort digits: `7 2 9 4 0 4 =` is to be answered by `0 2 4 4 7 9`. What is right can be
computed, so the reward is exact.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

Logits = Callable[[Tensor], Tensor]
"""From token ids ``[batch, positions]`` to logits ``[batch, positions, vocabulary]``."""

TOLERANCE = 1e-4
"""Of log-probabilities: both ends compute in float32, in another order."""
RISE = 0.1
"""By how much the mean reward of the last quarter must pass that of the first; rewards go from 0 to
1, and a quarter's mean varies by some hundredths."""

DIGITS = 10
SEPARATOR = DIGITS
"""Ends the prompt; the answer follows."""
WORDS = [*map(str, range(DIGITS)), "=", "<pad>"]


def write_model(folder: Path, seed: int) -> None:
    """Saves a Qwen3 of 130 thousand random float32 weights, and its tokenizer of a word a digit."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        # A model as narrow as this one hardly begins to learn from the usual 0.02.
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=len(WORDS) - 1,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    words = models.WordLevel({word: token for token, word in enumerate(WORDS)}, unk_token="<pad>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)


def prompts(number: int, length: int, generator: torch.Generator) -> Tensor:
    """Random digits and the separator: ``[number, length + 1]``, int64."""
    digits = torch.randint(DIGITS, (number, length), generator=generator)
    return torch.cat([digits, torch.full((number, 1), SEPARATOR)], dim=1)


def rewards(tokens: Tensor) -> Tensor:
    """The share of places that hold the right digit.

    Args:
        tokens: prompts with their answers, ``[batch, 2 * length + 1]``.

    Returns:
        ``[batch]``, float32, from 0 to 1.
    """
    length = tokens.shape[1] // 2
    right = tokens[:, :length].sort(dim=1).values
    return (tokens[:, length + 1 :] == right).float().mean(dim=1)


def readable(tokens: Tensor) -> str:
    """A prompt and its answer, of one row of tokens."""
    return " ".join(WORDS[token] for token in tokens.tolist())


class Update(NamedTuple):
    """One step of the trainers, and the version that came of it."""

    version: int
    """The one that every rollout runs after it."""
    reward: float
    """Mean of the samples that it learned from."""
    staleness: dict[int, int]
    """Tokens by how many versions they were behind."""
    crossed: int
    """See :attr:`Samples.crossed`."""
    mismatch: float
    """The largest difference between a rollout's log-probability of a token, and that by the
    weights that were pushed under the version which drew the token."""
    seconds: float
    push_seconds: float
    """From the call until vLLM goes on."""


def checks(updates: list[Update], bound: int) -> dict[str, bool]:
    """What has to hold of a run, by name.

    Args:
        bound: versions that a token may be behind.
    """
    before, after = quarters(updates)
    return {
        # Not a number is no agreement.
        "logprobs_agree": all(update.mismatch <= TOLERANCE for update in updates),
        "staleness_bounded": all(max(update.staleness) <= bound for update in updates),
        "reward_rose": after - before >= RISE,
    }


def quarters(updates: list[Update]) -> tuple[float, float]:
    """Mean reward of the first and of the last quarter of the updates."""
    rewards = [update.reward for update in updates]
    quarter = max(1, len(rewards) // 4)
    return statistics.fmean(rewards[:quarter]), statistics.fmean(rewards[-quarter:])


class Samples(NamedTuple):
    """A batch that one rollout drew; samples of one prompt are neighbours."""

    tokens: Tensor
    """Prompts with their answers, ``[batch, positions]``."""
    logprobs: Tensor
    """Of the answers' tokens, as the rollout drew them: ``[batch, answer]``."""
    versions: Tensor
    """Of the weights that drew each of these tokens: ``[batch, answer]``, int64."""
    rewards: Tensor
    """``[batch]``."""

    @property
    def version(self) -> int:
        """The oldest that drew a token."""
        return int(self.versions.min())

    @property
    def crossed(self) -> int:
        """Samples with tokens of two versions: a push came in the middle of their request."""
        return int((self.versions.amin(1) < self.versions.amax(1)).sum())


class SampleBuffer:
    """First in, first out, and never more than one update takes: rollouts don't wait for trainers,
    so a fresh batch takes the place of the oldest. What is too old when it would be learned from is
    discarded, too.

    Args:
        batches: that one update takes.
        staleness: versions that a sample's oldest token may be behind the trainers.
    """

    def __init__(self, batches: int, staleness: int) -> None:
        self._batches, self._staleness = batches, staleness
        self._waiting: deque[Samples] = deque()
        self.discarded = 0
        """Samples, since the beginning."""

    def put(self, batch: Samples) -> None:
        if len(self._waiting) == self._batches:
            self.discarded += len(self._waiting.popleft().rewards)
        self._waiting.append(batch)

    def take(self, version: int) -> list[Samples] | None:
        """What trainers at ``version`` learn from; ``None`` while there is too little."""
        fresh = [b for b in self._waiting if version - b.version <= self._staleness]
        kept = {id(batch) for batch in fresh}
        self.discarded += sum(len(b.rewards) for b in self._waiting if id(b) not in kept)
        self._waiting = deque(fresh)
        if len(fresh) < self._batches:
            return None
        self._waiting.clear()
        return fresh


def staleness(batches: list[Samples], version: int) -> Counter[int]:
    """Tokens by how many versions trainers at ``version`` are ahead of them."""
    behind = torch.cat([(version - batch.versions).flatten() for batch in batches])
    return Counter(behind.tolist())


def logprobs(logits: Logits, tokens: Tensor, length: int) -> Tensor:
    """Log-probabilities of the last ``length`` tokens of each row, ``[batch, length]``."""
    logp = logits(tokens[:, :-1])[:, -length:].float().log_softmax(-1)
    return logp.gather(-1, tokens[:, -length:, None]).squeeze(-1)


def advantages(rewards: Tensor, group: int) -> Tensor:
    """How much better each sample is than the others of its prompt (GRPO, DeepSeekMath, section
    4.1.2): its distance from the group's mean, in standard deviations.

    Args:
        rewards: ``[batch]``; samples of one prompt are neighbours.
        group: samples of each prompt.

    Returns:
        ``[batch]``; 0 throughout a group whose rewards are all alike.
    """
    by_prompt = rewards.view(-1, group)
    centred = by_prompt - by_prompt.mean(dim=1, keepdim=True)
    spread = by_prompt.std(dim=1, keepdim=True, correction=0)
    return (centred / (spread + 1e-4)).flatten()


def objective(new: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """The clipped surrogate of PPO (section 3), to be minimised: samples of an older version are
    weighed by how likely the policy makes them now, within ``1 - clip`` to ``1 + clip``.

    Args:
        new: log-probabilities ``[batch, length]`` by the policy that learns.
        old: by the version that drew the tokens.
        advantage: ``[batch]``.
        clip: how far the ratio of the two may be trusted.
    """
    ratio = (new - old).exp()
    held = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantage[:, None], held * advantage[:, None]).mean()
