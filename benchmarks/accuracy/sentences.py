# SPDX-License-Identifier: Apache-2.0
"""English sentences on twelve subjects, the same in every run."""

from __future__ import annotations

import random

_SUBJECTS = (
    (
        "the cook|my grandmother|a young chef|the baker",
        "stirred|tasted|burned|served",
        "the onion soup|a loaf of rye bread|the pepper sauce|two lemon cakes",
    ),
    (
        "the wind|heavy rain|a late frost|the morning fog",
        "covered|damaged|cleared|cooled",
        "the northern valley|most of the coast|the apple orchards|the airport",
    ),
    (
        "the court|a retired judge|the new minister|her lawyer",
        "rejected|signed|questioned|drafted",
        "the rental contract|an old tax law|the appeal|a patent claim",
    ),
    (
        "the nurse|a heart surgeon|the clinic|his doctor",
        "examined|treated|prescribed|postponed",
        "a broken wrist|the blood test|a course of antibiotics|the operation",
    ),
    (
        "the goalkeeper|our captain|the visiting team|a substitute",
        "missed|scored|saved|celebrated",
        "the decisive penalty|a goal from midfield|the final match|the second half",
    ),
    (
        "the compiler|an intern|the release team|a careless script",
        "deleted|rejected|rewrote|tested",
        "the login page|a thousand log files|the memory allocator|an old database",
    ),
    (
        "the pianist|a street band|the choir|her violin teacher",
        "rehearsed|recorded|forgot|improvised",
        "a slow waltz|the last chorus|an opera by Verdi|three folk songs",
    ),
    (
        "the bank|a small investor|the accountant|the central bank",
        "sold|raised|audited|lost",
        "the interest rate|its shares in steel|the annual budget|a pension fund",
    ),
    (
        "the ferry|our guide|an overnight train|the tourists",
        "reached|left|crossed|photographed",
        "the old harbour|a mountain pass|the border station|the southern islands",
    ),
    (
        "a grey heron|the shepherd dog|two foxes|the beekeeper",
        "chased|watched|fed|followed",
        "the geese at the pond|a lost lamb|the swarm|a family of hedgehogs",
    ),
    (
        "the telescope|a small probe|the astronauts|an amateur astronomer",
        "observed|photographed|orbited|repaired",
        "a distant galaxy|the rings of Saturn|the solar panel|a dying star",
    ),
    (
        "the history teacher|a shy pupil|the headmistress|the chess club",
        "explained|copied|cancelled|praised",
        "the chapter on Rome|her homework|the spring exam|a poem by Keats",
    ),
)
_ENDINGS = (
    "", " before sunrise", " in less than an hour", ", although nobody had asked", " without help",
    " for the third time this year", ", and everyone was surprised", " while the others waited",
    " because the plan had changed", " after a long discussion", ", as the papers wrote on Monday",
    " and then went home", ", which cost more than expected", " near the railway station",
)  # fmt: skip


def sentences(count: int, seed: int) -> list[str]:
    """Returns distinct sentences; those of two seeds may have some in common."""
    draw = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        parts = draw.choice(_SUBJECTS)
        words = [draw.choice(part.split("|")) for part in parts]
        text = " ".join(words) + draw.choice(_ENDINGS) + draw.choice(_ENDINGS)
        found[text[0].upper() + text[1:] + "."] = None
    return list(found)


def calibration_and_test(calibration: int, test: int) -> tuple[list[str], list[str]]:
    """Returns sentences to calibrate with, and others to measure on."""
    first = sentences(calibration, seed=1)
    others = [text for text in sentences(test + calibration, seed=2) if text not in set(first)]
    return first, others[:test]
