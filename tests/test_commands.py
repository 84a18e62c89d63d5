"""The commands of benchmarks and examples in the documentation and in docstrings are valid."""

import ast
import json
import re
import shlex

import pytest
import running

FOLDERS = "benchmarks", "examples"
# It hands flags that it does not know on to other processes, so its parser refuses none.
LEFT_OUT = "examples/islands/run.py"


def texts():
    """Each page of the project, and each docstring of a script: (where, text)."""
    pages = [*running.ROOT.glob("*.md"), *running.ROOT.glob("docs/*.md")]
    for folder in FOLDERS:
        pages += (running.ROOT / folder).glob("**/*.md")
        for script in (running.ROOT / folder).glob("**/*.py"):
            yield script, ast.get_docstring(ast.parse(script.read_text()), clean=False) or ""
    for page in pages:
        yield page, page.read_text()


def pieces(text):
    """Code in a text: lines of blocks, with those that go on, and what stands in backticks."""
    text = re.sub(r"\\\n\s*", " ", text)
    blocks = re.findall(r"^ *```.*?^ *```", text, re.DOTALL | re.MULTILINE)
    for block in blocks:
        text = text.replace(block, "")
        yield from block.splitlines()
    lines = re.findall(r"^ {4}.*", text, re.MULTILINE)
    yield from lines
    yield from re.findall(r"`([^`]+)`", re.sub(r"^ {4}.*", "", text, flags=re.MULTILINE))


def commands(text):
    """The command lines in a text, without what stands before and behind them."""
    looped = dict(re.findall(r"for (\w+) in (\S+)", text))
    for piece in pieces(text):
        # Rows of docs/papers.md shorten the path of the emulated hosts.
        piece = re.sub(
            r"^run\.py (?=-)", "python benchmarks/cluster/run.py ", " ".join(piece.split())
        )
        starts = list(
            re.finditer(rf"(?:(?<=python )|(?<=-- ))(?:{'|'.join(FOLDERS)})/\S+\.py", piece)
        )
        for start in starts:
            command = re.split(r" (?:&&|\|\||>) ", piece[start.start() :])[0]
            value = lambda name: looped.get(name[1], "1")  # the first, or the number of a process
            command = re.sub(r'"?\$(\w+)"?', value, command)
            if command.count("'") % 2:
                command = command.replace("'", "")  # sh -c '...'
            yield shlex.split(command, comments=True)


def answers(every):
    """What the scripts' parsers say to commands: see run_commands.py."""
    script = running.ROOT / "tests" / "run_commands.py"
    return json.loads(running.python(script, input=json.dumps(every)))


@pytest.mark.slow
def test_commands_are_valid():
    wrong = ["benchmarks/training.py", "--no-such-flag"], ["benchmarks/training.py", "--steps", "x"]
    every = [(None, command) for command in wrong]
    for where, text in texts():
        for command in commands(text):
            if command[0] == LEFT_OUT:
                continue
            if "parse_args(" in (running.ROOT / command[0]).read_text():
                every.append((where.relative_to(running.ROOT), command))
            else:  # calling it would run it
                assert len(command) == 1, f"{where}: {shlex.join(command)} takes no flags"
    assert len(every) > 150
    said = answers([command for _, command in every])
    unrecognized, invalid = said[: len(wrong)]
    assert "unrecognized arguments: --no-such-flag" in unrecognized
    assert "argument --steps: " in invalid
    refused = [
        f"{where}: {shlex.join(command)}\n  {answer.splitlines()[-1]}"
        for (where, command), answer in zip(every, said, strict=True)
        if answer and where
    ]
    assert not refused, "\n" + "\n".join(refused)
    assert sum(answer is None for answer in said) < 10
