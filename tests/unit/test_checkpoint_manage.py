"""``ds4d checkpoint``: what is listed, what verify finds, what rm refuses."""

import json
import re
import subprocess
import sys

import pytest

from ds4d import cli
from ds4d.run_lock import FolderInUse, refuse_locked
from tests.unit.test_checkpoint_folder import names, put, truncate
from tests.unit.test_cli import CONFIG


def call(capsys, *argv):
    code = cli.main(["checkpoint", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_ls_has_each_with_its_state(tmp_path, capsys):
    for step in (10, 20, 30, 15):
        put(tmp_path, step)
    truncate(tmp_path / "checkpoints" / "step-00000030")
    code, out, _ = call(capsys, "ls", tmp_path, "--json")
    listed = json.loads(out)
    assert code == 0
    assert [entry["step"] for entry in listed] == [10, 15, 20, 30]
    assert [entry["newest"] for entry in listed] == [False, True, False, False]
    assert "data-00000.safetensors: 100 bytes; " in listed[-1].pop("problem")
    assert not any(entry.get("problem") for entry in listed)
    folder = tmp_path / "checkpoints" / "step-00000010"
    sizes = {p.stat().st_size for p in folder.iterdir() if p.name != "manifest.json"}
    assert listed[0]["bytes"] == sum(sizes) and listed[0]["ranks"] == 1
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d\+00:00", listed[0]["saved_at"])
    _, out, _ = call(capsys, "ls", tmp_path)
    *lines, problem = out.splitlines()[1:]
    assert [int(line.split()[0]) for line in lines] == [10, 15, 20, 30]
    assert ["newest" in line for line in lines] == [False, True, False, False]
    assert "UNUSABLE" in lines[-1] and "data-00000.safetensors: 100 bytes" in problem


def test_verify_names_the_flipped_byte_and_the_missing_file(tmp_path, capsys):
    folders = [put(tmp_path, step) for step in (1, 2, 3)]
    code, out, _ = call(capsys, "verify", tmp_path)
    assert code == 0 and out.count("right") == 3
    flip(folders[0] / "data-00000.safetensors")
    (folders[1] / "rank-00000.pt").unlink()
    code, out, _ = call(capsys, "verify", tmp_path, "--json")
    first, second, third = (v["problems"] for v in sorted(json.loads(out), key=lambda v: v["path"]))
    assert code == 1 and third == []
    assert len(first) == 1 and "step-00000001/data-00000.safetensors is damaged" in first[0]
    assert len(second) == 1 and "rank-00000.pt: No such file" in second[0]
    code, out, _ = call(capsys, "verify", folders[2])
    assert code == 0 and out.startswith(str(folders[2]))
    flip(folders[2] / "index.json")
    assert "index.json is damaged" in call(capsys, "verify", folders[2])[1]
    code, _, err = call(capsys, "verify", tmp_path / "checkpoints")
    assert code == 2 and "is no run folder" in err


def test_rm_leaves_one_to_continue_from(tmp_path, capsys):
    for step in (1, 2, 3):
        put(tmp_path, step)
    truncate(tmp_path / "checkpoints" / "step-00000001")
    code, _, err = call(capsys, "rm", tmp_path, 2, 7)
    assert code == 2 and "no checkpoint of step 7; there are 3, 2, 1" in err
    code, _, err = call(capsys, "rm", tmp_path, 2, 3)
    assert code == 2 and "no complete checkpoint would be left" in err
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000002", "step-00000003"]
    code, out, _ = call(capsys, "rm", tmp_path, 1, 3, "--json")
    assert code == 0 and len(json.loads(out)["removed"]) == 2
    assert names(tmp_path) == ["latest", "step-00000002"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000002\n"
    assert call(capsys, "rm", tmp_path, 2)[0] == 2
    assert call(capsys, "rm", tmp_path, 2, "--force")[0] == 0
    assert names(tmp_path) == []


def test_a_folder_in_use_is_left_alone(tmp_path, capsys):
    """The holder is killed: its lock is gone with it."""
    for step in (1, 2):
        put(tmp_path, step)
    hold = (
        "import sys, time; from pathlib import Path; from ds4d.run_lock import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", hold, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(FolderInUse, match=f"is in use by process {holder.pid} on "):
            refuse_locked(tmp_path)
        code, _, err = call(capsys, "rm", tmp_path, 1)
        assert code == 2 and f"is in use by process {holder.pid} on " in err
        file = tmp_path / "run.json"
        file.write_text(json.dumps(CONFIG))
        assert cli.main(["train", str(file), "--output", str(tmp_path), "--resume", "auto"]) == 2
        assert f"is in use by process {holder.pid} on " in capsys.readouterr().err
        holder.kill()
    refuse_locked(tmp_path)
    assert call(capsys, "rm", tmp_path, 1)[0] == 0
