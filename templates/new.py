"""Makes the files of a new feature or operator: the placeholder, in names and contents, becomes its name.

What is yours to write is marked EDIT:; the tests fail until no mark is left.

python templates/new.py feature NAME [--root FOLDER]
python templates/new.py operator NAME [--root FOLDER]
"""

from __future__ import annotations

import argparse
import keyword
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Kind of thing -> the name that its template has.
KINDS = {"feature": "my_feature", "operator": "my_op"}


def instantiate(kind: str, name: str, root: Path) -> list[Path]:
    """Writes the template's files under `root`; returns them.

    Raises:
        ValueError: the name is no identifier, or one of the files exists.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ValueError(f"{name!r}: want a lower-case Python name")
    placeholder, folder = KINDS[kind], HERE / kind
    camel = "".join(part.capitalize() for part in placeholder.split("_"))
    sources = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    made = {source: root / str(source.relative_to(folder)).replace(placeholder, name) for source in sources}
    existing = [str(path) for path in made.values() if path.exists()]
    if existing:
        raise ValueError(f"exists already: {', '.join(existing)}")
    for source, path in made.items():
        text = source.read_text(encoding="utf-8").replace(placeholder, name)
        text = text.replace(placeholder.replace("_", "-"), name.replace("_", "-"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(camel, "".join(part.capitalize() for part in name.split("_"))), encoding="utf-8")
    return list(made.values())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("name", help="in lower case, such as rms_norm")
    parser.add_argument("--root", type=Path, default=HERE.parent, help="the checkout; default: this one")
    given = parser.parse_args(arguments)
    try:
        made = instantiate(given.kind, given.name, given.root)
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(map(str, made)))


if __name__ == "__main__":
    main()
