"""A stream of text and a transformer of one's own.

Messages from five departments have to be sorted into four topics. Every message begins with the
name of its department. Then come words of the department's own jargon and everyday words that mean
something else in each department (a cell, a charge, a bank), some of them off topic. One department
after the other is connected to the system. Plain training gives the everyday words their latest
meaning and forgets the others, although the first word says which one is meant.

    python examples/text.py --seeds 5 --method a-gem
"""

from __future__ import annotations

import argparse
from statistics import fmean, pstdev

import torch
from torch import Tensor, nn

from onepass import Memory, OnePass

TOPICS = 4
WORDS = 10  # of the longest message, the department's name included
EVERYDAY = 60  # words that all departments use
JARGON = 20  # words of each department's own
OFF_TOPIC = 0.25  # of the words
TEST_MESSAGES = 300
LEARNING_RATE = 0.001  # of Adam, for both methods
BATCH = 20

Messages = tuple[Tensor, Tensor]


class Encoder(nn.Module):
    """Embedding, one transformer layer, the mean over words, a linear layer; word 0 is padding."""

    def __init__(self, vocabulary: int, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        self.places = nn.Parameter(0.02 * torch.randn(WORDS, width))
        layer = nn.TransformerEncoderLayer(
            width, nhead=2, dim_feedforward=64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=1, enable_nested_tensor=False)
        self.out = nn.Linear(width, TOPICS)

    def forward(self, words: Tensor) -> Tensor:
        empty = words == 0
        embedded = self.words(words) + self.places
        encoded = self.encoder(embedded, src_key_padding_mask=empty)
        total = encoded.masked_fill(empty[:, :, None], 0).sum(1)
        scores: Tensor = self.out(total / (~empty).sum(1, keepdim=True))
        return scores


def write(
    department: int, departments: int, count: int, everyday: Tensor, generator: torch.Generator
) -> Messages:
    """Messages of a department, whose everyday words of a topic are `everyday[topic]`."""
    shape = (count, WORDS - 1)
    topics = torch.randint(TOPICS, (count,), generator=generator)
    stray = torch.rand(shape, generator=generator) < OFF_TOPIC
    elsewhere = torch.randint(TOPICS, shape, generator=generator)
    topic = torch.where(stray, elsewhere, topics[:, None])  # of each word
    choice = torch.randint(EVERYDAY // TOPICS, shape, generator=generator)
    common = 1 + departments + everyday[topic, choice]
    share = JARGON // TOPICS
    own = 1 + departments + EVERYDAY + department * JARGON + topic * share + choice % share
    words = torch.where(torch.rand(shape, generator=generator) < 0.5, common, own)
    lengths = torch.randint(5, WORDS, (count, 1), generator=generator)
    words[torch.arange(WORDS - 1) >= lengths] = 0
    return torch.cat([torch.full((count, 1), 1 + department), words], dim=1), topics


def learn(method: str, seed: int, departments: int, messages: int) -> tuple[float, float]:
    """Accuracy in % after the stream, on new messages of the old departments and of the last."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # van and the other method begin with the same weights
    model = Encoder(1 + departments + EVERYDAY + departments * JARGON)
    # The optimizer is given A-GEM's direction where it expects a gradient.
    adam = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    learner = OnePass(model, method, optimizer=adam, memory=Memory(per_task=250), seed=seed)
    tests = []
    for department in range(departments):
        everyday = torch.randperm(EVERYDAY, generator=generator).view(TOPICS, -1)
        words, topics = write(department, departments, messages, everyday, generator)
        tests.append(write(department, departments, TEST_MESSAGES, everyday, generator))
        for x, y in zip(torch.split(words, BATCH), torch.split(topics, BATCH), strict=True):
            learner.observe(x, y)
        learner.end_task()
    accuracy = [100 * (learner.predict(x) == y).double().mean().item() for x, y in tests]
    return fmean(accuracy[:-1]), accuracy[-1]


def measure(
    methods: list[str], seeds: int, departments: int = 5, messages: int = 1200
) -> dict[str, list[tuple[float, float]]]:
    """(old departments, last one) for each seed, for each method."""
    return {
        method: [learn(method, seed, departments, messages) for seed in range(seeds)]
        for method in methods
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A transformer of one's own on a stream of text.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--departments", type=int, default=5)
    parser.add_argument("--messages", type=int, default=1200, help="of each department")
    methods = ["a-gem", "gem", "s-gem", "er", "mega-1", "mega-2"]
    compared = "what van is compared with"
    parser.add_argument("--method", default="a-gem", choices=methods, help=compared)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)  # the steps are tiny: threads would only wait for each other

    found = measure(["van", given.method], given.seeds, given.departments, given.messages)
    setting = f"{given.departments} departments, {given.seeds} seeds, Adam at {LEARNING_RATE}"
    print(f"{setting}: accuracy in %, mean ± standard deviation")
    print(f"{'method':10}{'old ones':>15}{'last one':>15}")
    for method, scores in found.items():
        cells = [f"{fmean(x):8.1f} ± {pstdev(x):4.1f}" for x in zip(*scores, strict=True)]
        print(f"{method:10}{''.join(cells)}")
    kept = {method: fmean(old for old, _ in scores) for method, scores in found.items()}
    more = kept[given.method] - kept["van"]
    print(f"{given.method} keeps {more:.1f} points more of the old departments than van")


if __name__ == "__main__":
    main()
