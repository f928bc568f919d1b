# ruff: noqa: SIM905, E501  (long lists of phrases read better as text)
"""Writes the prompts that the shipped drafter's data answers: python recipes/smollm2_135m_prompts.py > prompts.jsonl

Word problems, functions to write or to complete, and everyday requests, all from the lists below; no evaluation prompt.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from random import Random

NAMES = (
    "Amira Ben Carla Diego Elena Farid Grace Hugo Ines Jonas Kofi Lucia Mateo Nadia Oscar Priya Quentin Rosa Samir "
    "Tara Umar Vera Wen Yusuf Zoe Anton Bianca Cedric Dora Emil Fatima Goran Hana Ivan Jill Kiran"
).split()
THINGS = (
    "apples pencils stickers marbles cookies books tickets eggs oranges flowers stamps shells balloons cards candles "
    "bottles muffins toys bricks tomatoes cupcakes postcards beads lemons notebooks peaches coins buttons"
).split()
PLACES = "the market;a school fair;the bakery;a small shop;the library;a farm;the zoo;a club;the station".split(";")
JOBS = "a baker;a painter;a gardener;a driver;a tailor;a nurse;a carpenter;a tutor;a plumber;a florist".split(";")
MATH_ENDINGS = (
    "",
    "\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "\nPlease reason step by step, and put your final answer within \\boxed{}.",
    " Explain your reasoning.",
    "\nLet's think step by step.",
)
WORD_PROBLEMS = (
    "{n} buys {a} {t} for ${b} each and sells them at {p} for ${c} each. How much profit does {n} make?",
    "{n} has {a} {t}. {m} has {b} times as many. How many {t} do they have together?",
    "There are {a} boxes of {t} with {b} in each. {n} gives away {c} of them. How many {t} are left?",
    "{n} works as {j} and earns ${a} an hour. Last week {n} worked {b} hours and spent ${c}. How much is left?",
    "A train travels {a} km in {b} hours. How far does it travel in {c} hours at the same speed?",
    "{n} reads {a} pages every day. A book has {d} pages. How many days does {n} need, and how many pages remain on the "
    "last day?",
    "{n} saves ${a} a week for {b} weeks, then buys {t} for ${c}. How many dollars are left?",
    "In a class of {d} students, {a} percent like {t}. How many students do not like {t}?",
    "{n} bakes {a} trays of {b} {t}. Half of them are sold in the morning and {c} in the afternoon. How many remain?",
    "{n} and {m} share {d} {t} so that {n} gets {a} more than {m}. How many does each get?",
    "A shirt costs ${d}. It is discounted by {a} percent. What does {n} pay for {b} of them?",
    "{n} walks {a} meters to {p} and back, {b} times a week. How many meters is that in {c} weeks?",
    "A tank holds {d} liters. It is filled at {a} liters a minute and leaks {b} liters a minute. How long until it is full?",
    "{n} is {a} years old. {m} is {b} years older. In {c} years, what will be the sum of their ages?",
    "{n} picked {a} {t} on Monday, twice as many on Tuesday and {b} fewer than on Tuesday on Wednesday. How many in all?",
    "Every day {n} uses {a} {t} for breakfast and {b} for lunch. {n} starts with {d}. After how many days are none left?",
    "{n} drives {d} miles. The car needs one gallon for {a} miles, and a gallon costs ${b}. What does the trip cost?",
    "Tickets to {p} cost ${a} for adults and ${b} for children. A family of {c} adults and {e} children pays how much?",
    "{n} has ${d}. {n} buys {e} {t} at ${b} each and {c} {u} at ${a} each. Can {n} pay, and how much is missing or left?",
    "{j} finishes a job in {a} hours, another one in {b} hours. How long do they need together?",
)
TASKS = (
    "find the largest {w} of a list;count how often each {w} occurs in a string;remove duplicates from a list of {w}s;"
    "sort a list of {w}s by length;check whether two lists have a common {w};reverse the order of {w}s in a sentence;"
    "find the {k}th smallest {w} in a list;merge two sorted lists of {w}s;rotate a list of {w}s by {k} positions;"
    "split a list of {w}s into {k} parts;find the first repeated {w};join {w}s with a separator;"
    "check whether a {w} is a palindrome;convert a list of {w}s to a dictionary of counts;"
    "find all {w}s that occur at least {k} times;move all zeros in a list to its end;"
    "compute the sum of the digits of a number;check if a number is divisible by {k};"
    "find the longest run of equal {w}s;compute the average of the {k} largest {w}s;"
    "replace every {k}th {w} in a list;compute the difference of two sets of {w}s;flatten a nested list of {w}s;"
    "compute the area of a triangle;compute the nth term of an arithmetic progression;find the minimum cost path in a grid;"
    "count the vowels in a string;check if a string contains only digits;transpose a matrix;find the median of {k} numbers;"
    "compute the volume of a cylinder;convert seconds to hours and minutes;find pairs that sum to {k};"
    "count the number of set bits of an integer;multiply all {w}s of a tuple;find the maximum product of two {w}s;"
    "remove all {w}s shorter than {k};extract every number from a string;check whether parentheses are balanced;"
    "compute the greatest common divisor of two integers;find all primes below n;compute the nth Fibonacci number;"
    "encode a string by shifting its letters by {k};decode a run-length encoded string;"
    "find the longest common prefix of strings;count the words that start with a given letter;"
    "compute the distance between two points;find the missing number in a sequence;"
    "group {w}s by their first letter;interleave two lists of {w}s;find the index of the smallest {w}"
).split(";")
CODE_WORDS = "element number word character string integer value item key letter tuple".split()
CODE_FORMS = (
    "Write a function to {task}.",
    "Write a python function to {task}.",
    "Write a python function to {task}.",
    "Write a Python function to {task} and show how to use it.",
    "How can I {task} in Python?",
    "Write a function to {task} using lambda functions.",
    "Write a program in {lang} to {task}.",
    "Explain how to {task} without using any library, then give the code.",
)
TYPES = "int str float List[int] List[str] List[float] bool Dict[str,int]".split()
SIGNATURE_HEAD = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
TOPICS = (
    "mountain hiking;solar panels;renting a flat;the water cycle;a school garden;black holes;learning the violin;"
    "online privacy;healthy breakfasts;the French Revolution;electric cars;time management;bird watching;vaccines;"
    "remote work;ancient Egypt;chess openings;coffee roasting;the stock market;plastic waste;a surprise party;"
    "machine learning;a lost dog;sleep;volcanoes;marathon training;public speaking;a new phone;jazz music;bees;"
    "a trip to Japan;a winter festival;photosynthesis;a broken laptop;budgeting;earthquakes;a job interview;tea;"
    "the moon;a community library;recycling;swimming;antibiotics;a science fair;a train journey;maps;dinosaurs;"
    "a night market;friendship;cloud computing;soil;a startup;whales;the printing press;gravity;a museum visit;"
    "inflation;glaciers;cooking pasta;urban trees;encryption;a family reunion;the immune system;sailing"
).split(";")
ROLES = (
    "a patient teacher;a travel guide;a doctor;a detective in a novel;a chef;an engineer;a historian;a football coach;"
    "a lawyer;a poet;a scientist on Mars;a librarian;a project manager;a philosopher;a customer"
).split(";")
CHAT_FORMS = (
    "Write a short blog post about {x} that a general reader would enjoy.",
    "Compose a persuasive email about {x} to {r2}. Keep it short.",
    "Describe {x} vividly, using all the senses, in two paragraphs.",
    "Pretend to be {r}. Answer a question about {x} in your own voice.",
    "What are the main differences between {x} and {y}?",
    "Give me {k} arguments for and {k} against caring about {x}.",
    "Explain {x} to {r2} in simple words.",
    "Write the opening paragraph of a story about {x} and {y}.",
    "Summarize what is known about {x} in {k} bullet points.",
    "Suppose {n} knows nothing about {x}. Outline a plan of {k} steps to learn about it.",
    "Draft a speech about {x} for {r2}.",
    "Imagine {x} from the point of view of {r}. What matters most?",
    "Compare {x} with {y} in a table.",
    "What could go wrong with {x}, and how would {r} prevent it?",
    "Make a list of {k} questions to ask {r} about {x}, and answer the first.",
    "If {x} disappeared tomorrow, what would happen? Discuss at least {k} consequences.",
    "Rewrite this sentence in {k} different styles: {n} spent the whole day thinking about {x}.",
    "Is it true that {x} matters more than {y}? Give reasons.",
    "{n} is older than {m}, and {m} is older than {o}. Is {o} older than {n}? Explain, then invent a similar riddle.",
    "Write a dialogue between {r} and {r2} about {x}.",
)


def word_problem(rng: Random) -> str:
    """Return a word problem with its request to reason."""
    n, m = rng.sample(NAMES, 2)
    t, u = rng.sample(THINGS, 2)
    numbers = {"a": rng.randint(3, 40), "b": rng.randint(2, 12), "c": rng.randint(2, 15), "d": rng.randint(40, 400)}
    text = rng.choice(WORD_PROBLEMS).format(
        n=n, m=m, t=t, u=u, p=rng.choice(PLACES), j=rng.choice(JOBS), e=rng.randint(2, 6), **numbers
    )
    return text[0].upper() + text[1:] + rng.choice(MATH_ENDINGS)


def _task(rng: Random) -> str:
    return rng.choice(TASKS).format(w=rng.choice(CODE_WORDS), k=rng.randint(2, 9))


def function_request(rng: Random) -> str:
    """Return a request for a function in words."""
    return rng.choice(CODE_FORMS).format(task=_task(rng), lang=rng.choice(["Python", "Python", "JavaScript", "C++"]))


def function_to_complete(rng: Random) -> str:
    """Return a signature with a docstring, to be completed."""
    task = _task(rng)
    words = [word for word in task.replace("'", "").split() if word.isalpha()]
    name = "_".join(words[: rng.randint(2, 4)])
    arguments = rng.sample(["numbers", "text", "n", "values", "words", "k", "items", "threshold"], rng.randint(1, 2))
    signature = ", ".join(f"{argument}: {rng.choice(TYPES)}" for argument in arguments)
    imports = "from typing import List\n\n\n" if "List" in signature else ""
    docstring = task[0].upper() + task[1:] + "."
    return (
        f'{SIGNATURE_HEAD}{imports}def {name}({signature}) -> {rng.choice(TYPES)}:\n    """ {docstring}\n    """\n\n```'
    )


def everyday_request(rng: Random) -> str:
    """Return a request for text: writing, explaining, comparing, playing a role."""
    x, y = rng.sample(TOPICS, 2)
    r, r2 = rng.sample(ROLES, 2)
    n, m, o = rng.sample(NAMES, 3)
    return rng.choice(CHAT_FORMS).format(x=x, y=y, r=r, r2=r2, n=n, m=m, o=o, k=rng.randint(2, 7))


KINDS: tuple[Callable[[Random], str], ...] = (word_problem, function_request, function_to_complete, everyday_request)


def prompts(count: int, seed: int) -> list[str]:
    """Return `count` different prompts, the kinds in turn."""
    rng = Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found.setdefault(KINDS[len(found) % len(KINDS)](rng))
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for prompt in prompts(arguments.count, arguments.seed):
        print(json.dumps({"turns": [prompt]}))


if __name__ == "__main__":
    main()
