"""The Python API: open an index once, ask many questions, look at the certificate.

python examples/ask.py run.stride "The French Revolution began in" "Magna Carta was sealed in"
"""

from __future__ import annotations

import sys

from stride_cli.api import QueryOptions, Session


def main(index: str, prompts: list[str]) -> None:
    session = Session.open(index)
    for prompt in prompts:
        answer = session.query(prompt, QueryOptions(top=3, bottom=1))
        print(f"{prompt}{answer.query.response}")
        for hit in [*answer.supporters, *answer.opposers]:
            print(f"  {hit.sign} {hit.share:5.1%}  {answer.document_ids[hit.document]}")
        solution = answer.solution
        print(f"  R² {solution.r_squared:.2f}, relative duality gap {solution.relative_gap:.0e}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(sys.argv[1], sys.argv[2:])
