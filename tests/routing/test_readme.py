import re
from pathlib import Path

README = Path(__file__).parents[2] / "packages" / "routing" / "README.md"


def test_the_example_prints_what_the_readme_says(capsys):
    text = README.read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (output,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    assert capsys.readouterr().out == output
