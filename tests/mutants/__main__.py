"""The command: mutates modules, runs their tests, and reports the survivors."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import random
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tests.mutants.edits import edits_of
from tests.mutants.report import document, table
from tests.mutants.running import Broken, Copy, Mutant, Verdict
from tests.mutants.table import STAGES, path_of

DESCRIPTION = """\
Change one thing in the code at a time and check whether a test fails. Runs on copies of the tree in a temporary folder.
An interrupted run continues where it stopped: results are reused for caught mutants until their module changes, and for
survivors until anything in src, sdks or tests changes.

modules (all, unless some are named):
  {modules}
"""
EPILOG = """\
examples:
  python -m tests.mutants --sample 200             200 mutants of all modules, at least 8 of each: about half an hour
  python -m tests.mutants retry engine/lanes       every mutant of two modules
  python -m tests.mutants --sample 200 --document  and write docs/mutants.md

The exit code is 1 when less than {least:.0%} are caught.
"""
ROOT = Path(__file__).parents[2]
LOG = ROOT / ".mutants" / "results.jsonl"
PER_MODULE_MIN = 8
CAUGHT_MIN = 0.85


def mutants_of(modules: list[str]) -> list[Mutant]:
    found = []
    for module in modules:
        path = path_of(module)
        source = (ROOT / path).read_text()
        found += [Mutant(module, path, edit, source) for edit in edits_of(source)]
    return found


def sample(mutants: list[Mutant], number: int, seed: int) -> list[Mutant]:
    """A sample of all mutants, with at least a few of each module."""
    chance = random.Random(seed)
    shuffled = chance.sample(mutants, len(mutants))
    taken: dict[str, int] = {}
    first: list[Mutant] = []
    rest: list[Mutant] = []
    for mutant in shuffled:
        few = taken.setdefault(mutant.module, 0) < PER_MODULE_MIN
        taken[mutant.module] += few
        (first if few else rest).append(mutant)
    return (first + rest)[:number]


def fingerprint() -> str:
    """Changes with any file in src, sdks or tests."""
    digest = hashlib.sha256()
    for folder in ("src", "sdks", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".js") and path.parent != Path(__file__).parent:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def known(tree: str) -> dict[str, Verdict]:
    """Results of earlier runs that are still valid."""
    found = {}
    if LOG.exists():
        for line in LOG.read_text().splitlines():
            said = json.loads(line)
            key, of = said.pop("key"), said.pop("tree")
            if said["outcome"] != "survived" or of == tree:
                found[key] = Verdict(**said)
            else:
                found.pop(key, None)
    return found


def run(mutants: list[Mutant], jobs: int) -> dict[str, Verdict]:
    tree = fingerprint()
    verdicts = known(tree)
    waiting = [mutant for mutant in mutants if mutant.key not in verdicts]
    LOG.parent.mkdir(exist_ok=True)
    done, began, lock = len(mutants) - len(waiting), time.monotonic(), threading.Lock()
    with tempfile.TemporaryDirectory(prefix="mutants-") as place, open(LOG, "a") as log:
        copies: queue.Queue[Copy] = queue.Queue()
        for number in range(jobs):
            copies.put(Copy(ROOT, Path(place, str(number))))

        def judge(mutant: Mutant) -> None:
            nonlocal done
            copy = copies.get()
            try:
                verdict = copy.judge(mutant, STAGES[mutant.module])
            finally:
                copies.put(copy)
            with lock:
                verdicts[mutant.key] = verdict
                print(json.dumps({"key": mutant.key, "tree": tree} | asdict(verdict)), file=log, flush=True)
                done += 1
                minutes = (time.monotonic() - began) / 60
                print(
                    f"{done} of {len(mutants)} in {minutes:.1f} minutes: {mutant.module}:{mutant.edit.line} "
                    f"{verdict.outcome} {verdict.by}",
                    file=sys.stderr,
                    flush=True,
                )

        with ThreadPoolExecutor(jobs) as pool:
            asked = [pool.submit(judge, mutant) for mutant in waiting]
            try:
                for answer in asked:
                    answer.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return {mutant.key: verdicts[mutant.key] for mutant in mutants}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=DESCRIPTION.format(modules=", ".join(STAGES)),
        epilog=EPILOG.format(least=CAUGHT_MIN),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="such as lifecycle or engine/lanes")
    parser.add_argument("--sample", type=int, metavar="N", help="only this many random ones, by the seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="concurrent runs (default: one per core)")
    parser.add_argument("--document", action="store_true", help="write the result to docs/mutants.md")
    options = parser.parse_args()
    unknown = set(options.modules) - set(STAGES)
    if unknown:
        parser.error(f"not in the table of tests/mutants/table.py: {', '.join(sorted(unknown))}")
    mutants = every = mutants_of(options.modules or list(STAGES))
    if options.sample is not None:
        mutants = sample(every, options.sample, options.seed)
    try:
        verdicts = run(mutants, options.jobs)
    except Broken as failed:
        print(failed, file=sys.stderr)
        return 2
    print(table(mutants, verdicts, every))
    if options.document:
        document(ROOT, mutants, verdicts, every)
    caught = sum(verdict.outcome != "survived" for verdict in verdicts.values())
    return 0 if caught >= CAUGHT_MIN * len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
