"""Rules of groups.jsonl, and of the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from record_checker.form import Record, close, is_whole

FATES = ("trained", "zero_variance", "truncated", "failed")
REASONS = ("raised", "timeout", "nonsense", "died")


def groups_agree_with_steps(record: Record) -> Iterator[str]:
    batch = record.config["recipe"]["batch"]
    for step, row in zip(record.steps, record.groups, strict=False):
        where = f"step {step['step']}"
        if len({len(row[key]) for key in ("prompt", "epoch", "fate", "correct", "n")}) > 1:
            yield f"{where}: the lists of groups.jsonl are of several lengths"
            continue
        if any(not 0 <= c <= n for c, n in zip(row["correct"], row["n"], strict=True)):
            yield f"{where}: a group has more correct completions than completions, or fewer than none"
        if strange := set(row["fate"]) - set(FATES):
            yield f"{where}: unknown fates {sorted(strange)}"
        n, trained = sum(row["n"]), row["fate"].count("trained")
        for name, expected in (
            ("groups", len(row["n"])),
            ("completions", n),
            ("groups_used", trained),
            ("correct", sum(row["correct"]) / n if n else 0),
        ):
            if not close(step[name], expected):
                yield f"{where}: {name} is {step[name]}, and the groups make it {expected}"
        wanted, most = batch["prompts"], batch["prompts"]
        if record.config["recipe"]["zero_variance"] == "resample":
            most *= batch["max_gen_batches"]
            filled = trained == wanted and row["fate"][-1] == "trained" and len(row["n"]) <= most
            wanted = len(row["n"]) if filled else most
        if row["n"] != [batch["samples"]] * wanted:
            yield f"{where}: groups of {row['n']}, not {batch['prompts']} of {batch['samples']}"


def what_was_used(record: Record) -> Iterator[str]:
    """Groups without signal, and completions left after truncation and zero variance."""
    drops = record.config["recipe"]["zero_variance"] != "keep"
    for step, row in zip(record.steps, record.groups, strict=False):
        where, fates = f"step {step['step']}", Counter(row["fate"])
        without = step["zero_variance"] * step["groups"]
        least = step["groups"] - fates["trained"]
        most = least if drops else step["groups"]
        if not is_whole(without) or not least <= round(without) <= most:
            yield f"{where}: zero_variance is {step['zero_variance']}, with the fates {dict(fates)}"
        if fates["zero_variance"] and not drops:
            yield f"{where}: groups of zero variance are dropped, and the recipe keeps them"
        if set(step["failed"]) - set(REASONS) or any(n < 1 for n in step["failed"].values()):
            yield f"{where}: failed is {step['failed']}"
        failed, truncated = sum(step["failed"].values()), step["truncated"] * step["completions"]
        whole = sum(n for n, fate in zip(row["n"], row["fate"], strict=True) if fate == "trained")
        if not whole - failed - round(truncated) <= step["completions_used"] <= whole:
            yield f"{where}: completions_used is {step['completions_used']}; the trained groups have {whole}"
        if step["completions_used"] < step["groups_used"]:
            yield f"{where}: {step['completions_used']} completions of {step['groups_used']} groups are used"
        if failed > step["completions"]:
            yield f"{where}: {failed} verifications failed, of {step['completions']}"
        if failed + round(step["correct"] * step["completions"]) > step["completions"]:
            yield f"{where}: a completion whose verification failed is correct"
        for name in ("truncated", "interrupted"):
            if not is_whole(step[name] * step["completions"]):
                yield f"{where}: {name} is {step[name]} of {step['completions']} completions"


def each_draw_once_and_in_order(record: Record) -> Iterator[str]:
    following: Counter[str] = Counter()
    seen = set()
    for row in record.groups:
        for prompt, epoch in zip(row["prompt"], row["epoch"], strict=False):
            if (prompt, epoch) in seen:
                yield f"step {row['step']}: epoch {epoch} of {prompt} comes twice"
            elif epoch != following[prompt]:
                yield f"step {row['step']}: epoch {epoch} of {prompt}, and {following[prompt]} was next"
            seen.add((prompt, epoch))
            following[prompt] = max(following[prompt], epoch + 1)


def ledger_balances(record: Record) -> Iterator[str]:
    fates: Counter[str] = Counter()
    for step, row in zip(record.steps, record.groups, strict=False):
        where, ledger = f"step {step['step']}", dict(step["ledger"])
        fates.update(row["fate"])
        admitted = ledger.pop("admitted")
        if set(ledger) != {*FATES, "in_flight"}:
            yield f"{where}: the ledger has {sorted(ledger)}"
        if admitted != sum(ledger.values()):
            yield f"{where}: {admitted} groups were admitted, and the ledger has {sum(ledger.values())}"
        if wrong := {fate: ledger.get(fate) for fate in FATES if ledger.get(fate) != fates[fate]}:
            yield f"{where}: the ledger has {wrong}, and groups.jsonl {dict(fates)}"
        if ledger.get("in_flight") != sum(step["queue"].values()):
            yield f"{where}: {ledger.get('in_flight')} groups in flight, and in the queue {step['queue']}"
