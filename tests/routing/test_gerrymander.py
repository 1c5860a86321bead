"""The gerrymandering experiment: same seed, same table; the descents end where the page of the package says."""

import gzip
import random
import subprocess
import sys

import pytest
import torch
from coterie_routing import RouterConfig
from coterie_routing.experiments import gerrymander
from coterie_routing.experiments.corpus import folder_corpus, machine_corpus
from coterie_routing.experiments.descent import byte_start, crowded_start, descend, second_choice_start
from coterie_routing.experiments.model import ByteModel


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two domains of 16 small documents of words that only one of them uses."""
    folder = tmp_path_factory.mktemp("corpus")
    words = {"code": ["def", "return", "self", "(x)", ":"], "prose": ["the", "licence", "of", "software", "is"]}
    for name, vocabulary in words.items():
        (folder / name / "deeper").mkdir(parents=True)
        for number in range(16):
            text = " ".join(random.Random(number).choices(vocabulary, k=100)).encode()
            file = folder / name / "deeper" / f"{number}.txt"
            file.write_bytes(text)
    return folder


def run(arguments, capsys):
    assert gerrymander.main(["--quick", *[str(one) for one in arguments]]) == 0
    return capsys.readouterr()


def test_the_same_seed_gives_the_same_table_and_every_row_is_there(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gerrymander.importlib.util, "find_spec", lambda name: None)
    torch.set_num_threads(2)
    first = run(["--corpus", corpus, "--out", tmp_path], capsys)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert threads == 2
    again = run(["--corpus", corpus], capsys)
    assert first.out == again.out
    assert [file.name for file in tmp_path.iterdir()] == ["gerrymandering.txt"]
    assert (tmp_path / "gerrymandering.txt").read_text(encoding="utf-8") == first.out
    assert 'pip install "coterie-routing[plot]"' in first.err
    lines = first.out.splitlines()
    for settings, recipes in gerrymander.GROUPS:
        start = lines.index(f"{settings.num_experts} experts, top-{settings.top_k}, {settings.score_function}")
        rows = lines[start + 2 : start + 2 + len(recipes)]
        assert [row[:32].strip() for row in rows] == [recipe.name for recipe in recipes]
        for row in rows:
            numbers = [float(one.rstrip("%")) for one in row[32:].split()[:9]]
            assert 0 < numbers[0] < 9  # bits per byte
            assert numbers[3] >= 1  # 1 + CV^2
    for start in gerrymander.starts(folder_corpus(corpus, most_bytes=10**6, fewest_bytes=100), 0, True):
        assert sum(line.startswith(start.name) for line in lines) == 2
    assert lines[0].startswith("--quick: a few tiny steps")
    assert not any("came out" in line for line in lines), "three steps are nothing to draw a conclusion from"


def test_another_seed_gives_another_table_and_there_is_a_plot(corpus, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    text = run(["--corpus", corpus, "--out", tmp_path, "--seed", "1"], capsys).out
    picture = (tmp_path / "gerrymandering.svg").read_bytes()
    assert b"squared_load, step" in picture
    assert len(picture) < 200_000
    assert text != run(["--corpus", corpus, "--seed", "2"], capsys).out


def test_without_a_loophole_the_second_choice_is_spread():
    start = second_choice_start(steps=150)
    stuck, spread = descend(start, "dot_product"), descend(start, "squared_load")
    assert stuck.scores[-1] < stuck.scores[0] < 0.6
    assert stuck.load_scores[-1] == stuck.load_scores[0] > 2
    assert (stuck.report.verdict, spread.report.verdict) == ("gerrymandered", "even")
    assert spread.load_scores[-1] < 1.02


def test_crowded_tokens():
    alike = descend(crowded_start(noise=0.0, steps=3), "dot_product")
    assert alike.scores[0] == pytest.approx(0.83752)
    assert alike.scores[3] < alike.scores[0]
    assert alike.load_scores == [pytest.approx(2.08)] * 4
    told_apart = descend(crowded_start(noise=0.01, steps=60), "dot_product")
    assert told_apart.report.verdict == "even"


def test_tokens_of_one_byte_move_as_one(corpus):
    domains = folder_corpus(corpus, most_bytes=10**6, fewest_bytes=100)
    start = byte_start(domains, num_tokens=200, num_experts=4, top_k=1, steps=5)
    assert start.logits_RE.shape == (256, 4)
    assert start.row_T.shape == (200,)
    before = start.logits_RE.clone()
    descend(start, "squared_load")
    assert torch.equal(start.logits_RE, before)


def test_corpus_of_folders(corpus):
    code, prose = folder_corpus(corpus, most_bytes=10**6, fewest_bytes=100)
    assert (code.name, prose.name) == ("code", "prose")
    assert code.num_files == 16
    held_out = bytes(code.held_out.tolist()).split(b"\0")[:-1]
    train = bytes(code.train.tolist()).split(b"\0")[:-1]
    assert (len(held_out), len(train)) == (2, 14)
    assert not set(held_out) & set(train)
    few, _ = folder_corpus(corpus, most_bytes=1000, fewest_bytes=100)
    assert 1000 <= few.train.numel() < 2000


def test_corpus_leaves_out_copies_binaries_and_what_cannot_be_read(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(16):
            (tmp_path / name / f"{number}.txt").write_text(f"{name} {number} " * 50, encoding="utf-8")
    (tmp_path / "a" / "copy.txt").write_text("a 3 " * 50, encoding="utf-8")
    (tmp_path / "a" / "binary").write_bytes(b"\0\1" * 500)
    (tmp_path / "a" / "broken.gz").write_bytes(b"not packed")
    (tmp_path / "a" / "empty").write_bytes(b"")
    (tmp_path / "b" / "page.gz").write_bytes(gzip.compress(b"packed text " * 50))
    a, b = folder_corpus(tmp_path, most_bytes=10**6, fewest_bytes=100)
    assert (a.num_files, b.num_files) == (16, 17)
    assert (bytes(a.train.tolist()) + bytes(a.held_out.tolist())).count(b"a 3 " * 50) == 1
    assert b"packed text" in bytes(b.train.tolist()) + bytes(b.held_out.tolist())


def test_a_corpus_needs_two_domains(corpus, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"two domains are needed.*nowhere has none"):
        folder_corpus(tmp_path / "nowhere", most_bytes=100, fewest_bytes=10)
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "one.txt").write_text("text", encoding="utf-8")
    with pytest.raises(SystemExit):
        gerrymander.main(["--quick", "--corpus", str(tmp_path)])
    assert "only 0 and 5" in capsys.readouterr().err


def test_arguments_are_checked(capsys):
    with pytest.raises(SystemExit):
        gerrymander.main(["--steps", "0"])
    assert "must be at least 1, not 0" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="the places are those of Linux")
def test_this_machine_has_text():
    domains = machine_corpus(most_bytes=30_000, fewest_bytes=1000)
    assert len(domains) >= 2
    assert all(one.train.numel() >= 1000 and one.train.dtype == torch.uint8 for one in domains)


def test_the_model_is_causal_and_every_chosen_expert_counts():
    torch.manual_seed(0)
    model = ByteModel(RouterConfig(d_model=8, num_experts=4, top_k=2), expert_width=3)
    bytes_BS = torch.randint(256, (2, 12))
    changed_BS = bytes_BS.clone()
    changed_BS[:, 7:] = (changed_BS[:, 7:] + 1) % 256
    (logits, routing), (other, _) = model(bytes_BS), model(changed_BS)
    torch.testing.assert_close(logits[:, :7], other[:, :7], rtol=0, atol=0)
    assert (logits[:, 7:] != other[:, 7:]).any()
    logits.sum().backward()
    used = model.down_FD.grad.reshape(4, 3, 8).abs().amax((1, 2)) > 0
    assert torch.equal(used, routing.counts_E > 0)


def test_it_runs_as_a_module(corpus):
    command = [sys.executable, "-W", "error", "-m", "coterie_routing.experiments.gerrymander", "--help"]
    assert "--corpus" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
