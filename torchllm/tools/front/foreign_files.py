"""Parse the config files of other programs into tables, without running any of their code."""

import ast
import itertools
import json
import operator
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

LAUNCHER_OPTIONS = {"nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "standalone"}
"""Options of torchrun in the same script: NPROC and NNODES here."""


def parse_foreign(path: Path, text: str, function: str) -> dict[str, Any]:
    """Return the tables of a file. function: which one of a Python file returns the config; "": there is one.

    ValueError or SyntaxError if the text is not of the kind that the file's name says.
    """
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix == ".py":
        return _python_config(path, text, function)
    if path.suffix == ".json":
        table = json.loads(text)
        return table.get("user_config", table) if isinstance(table, dict) else {}
    if path.suffix in (".yaml", ".yml"):
        import yaml

        try:
            table = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(error) from None
        return table if isinstance(table, dict) else {}
    return _arguments(text)


def flat_keys(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted keys. A string such as "4e-4", as YAML reads 4e-4, is a number."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = prefix + str(key).replace("-", "_")
        values |= flat_keys(value, f"{name}.") if isinstance(value, dict) and value else {name: _number(value)}
    return values


def _python_config(path: Path, text: str, function: str) -> dict[str, Any]:
    """Return the literal keyword arguments of the `Trainer.Config(...)` that a function returns."""
    module = ast.parse(text)
    functions = {node.name: node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)}
    constants = _constants(module)
    configs = {name: table for name in functions if (table := _returned(name, functions, constants))}
    names = ", ".join(configs) or "none"
    if function and function not in configs:
        raise ValueError(f"no function {function} that returns a Config(...); there are: {names}")
    if not function and len(configs) != 1:
        raise ValueError(f"name one function, {path}:NAME; there are: {names}")
    name = function or next(iter(configs))
    return {"model.name": re.split(r"_(?=\d+(?:_\d+)?[bm]|debug)", name)[0], **configs[name]}


def _constants(module: ast.Module) -> dict[str, Any]:
    """Return the values of the names that a module assigns at its top, and nowhere again."""
    assigned = Counter(
        node.id for node in ast.walk(module) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    )
    constants: dict[str, Any] = {}
    for node in module.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if assigned[name] == 1:
                constants[name] = _literal(value, constants)
    return constants


def _returned(name: str, functions: dict[str, ast.FunctionDef], constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config that a function returns; {} if it returns none. It may change the config of another function.

    `config.a.b = value` is followed for values that `_literal` understands, but no branches, loops and calls.
    """
    names: dict[str, Any] = dict(constants)
    for statement in functions[name].body:
        if not isinstance(statement, ast.Assign | ast.Return) or statement.value is None:
            continue
        value = statement.value
        called = value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""
        others = {key: node for key, node in functions.items() if key != name}
        result: Any = _returned(called, others, constants) if called in others else _literal(value, names)
        if isinstance(statement, ast.Return):
            return result if isinstance(result, dict) else {}
        variable, *path = ast.unparse(statement.targets[0]).split(".")
        table = names.get(variable) if path else names
        for part in path[:-1]:
            table = table.setdefault(part, {}) if isinstance(table, dict) else None
        if isinstance(table, dict):
            table[path[-1] if path else variable] = result
    return {}


def _literal(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return a value that is written in the source. A call is the table of its keyword arguments.

    `Class.Config()` is "Class", `model_registry("8B")` is "8B" and `DATASETS["c4"]` is "c4": the name of the result.
    names: values of variables. The value of any other name is not known: "$NAME".
    """
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _literal(node.left, names), _literal(node.right, names)
        if isinstance(left, int | float) and isinstance(right, int | float):
            with suppress(ArithmeticError):
                return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Call):
        is_named = len(node.args) == 1 and isinstance(node.args[0], ast.Constant | ast.Name)
        flavor = _literal(node.args[0], names) if is_named else None
        if node.keywords:
            table = {str(keyword.arg): _literal(keyword.value, names) for keyword in node.keywords}
            return table if flavor is None else {"flavor": flavor, **table}
        if flavor is not None:
            return flavor
        return ast.unparse(node.func).removesuffix(".Config")
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value
    try:
        return ast.literal_eval(node)
    except ValueError:
        return "$" * isinstance(node, _UNKNOWN) + ast.unparse(node)


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_OPERATORS[ast.FloorDiv] = operator.floordiv
_UNKNOWN = ast.Name | ast.Attribute | ast.BinOp | ast.IfExp | ast.JoinedStr
"""expressions whose value is not in the source: it is written with a dollar sign, like a variable of a shell"""


def _arguments(text: str) -> dict[str, Any]:
    """Return the options of a command line, or of a shell script's: `--key value ...`, `--key=value` or `--key`.

    The values of an option end with the line. A variable is known if a line assigns it, once, before its use.
    Of the modules that a script of nanochat starts base_train alone is read: others have options of the same names.
    """
    options: dict[str, list[str]] = {}
    variables: dict[str, str] = {}
    for words in _lines(text):
        if len(words) == 1 and (found := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0])):
            known = found[1] not in variables and "$" not in (value := _expanded(found[2], variables))
            variables[found[1]] = value if known else ""
        if any(re.fullmatch(r"(scripts|nanochat)\.(?!base_train$)\w+", word) for word in words):
            continue
        key = ""
        for word in itertools.chain.from_iterable(map(_split_options, words)):
            match = re.fullmatch(r"--([A-Za-z][\w-]*)(?:=(.*))?", word)
            if match:
                key = match[1].replace("-", "_")
                options[key] = [] if match[2] is None else [_expanded(match[2], variables)]
            elif word in _ENDS:
                key = ""
            elif key:
                options[key].append(_expanded(word, variables))
    kept = options.keys() - LAUNCHER_OPTIONS
    return {key: _number(" ".join(options[key])) if options[key] else True for key in options if key in kept}


def _lines(text: str) -> Iterator[list[str]]:
    """Yield the words of each line of a shell script, without comments and `export`.

    A backslash or an open quote continues a line.
    """
    # The end of a line becomes a word, twice: a comment takes the first one.
    spaced = text.replace("\\\n", " ").replace("\n", " \n \n ")
    lexer = shlex.shlex(spaced, posix=True)
    lexer.whitespace_split = True
    lexer.whitespace = " \t\r"
    for is_end, words in itertools.groupby(lexer, key=lambda word: word == "\n"):
        line = list(words)
        if not is_end:
            yield line[1:] if line[0] == "export" else line


def _split_options(word: str) -> list[str]:
    """Split options that are one word of the shell: "--key value" in quotes, NAME="--key value", NAME=(--key value."""
    if match := re.fullmatch(r"(?:\w+\+?=\(?)?\s*(--.*)", word, re.DOTALL):
        return shlex.split(match[1])
    value = word.rstrip(");")
    return [word] if "(" in word or value in ("", word) else [value, ")"]


_ENDS = (")", "|", "&", "&&", "||", ";", ">", ">>", "2>&1")
"""Words of the shell behind an option's values."""


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replace known variables: $NAME, ${NAME}, ${NAME:-default}; the default where the name is not known."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3]) or match[2] or match[0]

    pattern = re.compile(r"\$\{(\w+)(?::?[-=]([^${}]*))?\}|\$(\w+)")
    while (expanded := pattern.sub(value, text)) != text:  # a default may name a variable
        text = expanded
    return text


def _number(value: Any) -> Any:
    """Return a string as a number if it is one, and any other value as it is."""
    for kind in (int, float) if isinstance(value, str) else ():
        try:
            return kind(value)
        except ValueError:
            pass
    return value
