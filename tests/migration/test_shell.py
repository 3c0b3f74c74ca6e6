"""Launch scripts: flags in commands, arrays and quoted texts, edited in place."""

from __future__ import annotations

import subprocess

import pytest

from mindspeed_lite.migration import read_script

SCRIPT = r"""#!/bin/bash
# --seq-aux in a comment stays
NPUS=8
CP=1
CP_TYPE='ulysses_cp_algo'
export NUM_LAYERS=64   # three are empty
LAYERS=${NUM_LAYERS}
DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS \
    --nnodes 1
"
MOE_ARGS="
    --first-k-dense-replace 3 \
    --moe-layer-freq 1 \
    --num-experts 256 \
	--norm-topk-prob
"
ARGS=(
    --multi-head-latent-attention   # latent attention
    --rope-scaling-type yarn --rope-scaling-factor 40 --bf16
    --context-parallel-size ${CP} --context-parallel-algo "${CP_TYPE}"
    --pipeline-model-parallel-size 2
    --num-layers $LAYERS --noop-layers 61,62,63
    --qk-nope-head-dim $((64 * 2)) --tokenizer-name-or-path "a b/c" --save="${OUT}/x y"
    --data-path ${DATA[@]}
    --adaptive-recompute-device-size $(cat level)
)
UNREAD="--auto-settings"
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \
    "${ARGS[@]}" \
    $MOE_ARGS $OWN \
    --own-flag 3 --no-shared-storage | tee log
python other.py \
    --bf16 \
    --norm-topk-prob
echo done; echo "it's" '--seq-aux'
"""

EDITS = [
    ("--first-k-dense-replace 3 \\\n    --moe-layer-freq 1 \\", "--moe-layer-freq ([0]*3+[1]*58) \\"),
    ('\t--norm-topk-prob\n"', '"'),
    ("--multi-head-latent-attention ", "--multi-latent-attention "),
    ("--rope-scaling-type yarn --rope-scaling-factor", "--rotary-scaling-factor"),
    ("--num-layers $LAYERS --noop-layers 61,62,63", '--num-layers 61 --pipeline-model-parallel-layout "Et*32|t*29L"'),
    ("--qk-nope-head-dim", "--qk-head-dim"),
    ("$DISTRIBUTED_ARGS pretrain_gpt.py", "$DISTRIBUTED_ARGS -m mindspeed_lite run pretrain_gpt.py"),
    ("--tokenizer-name-or-path", "--tokenizer-model"),
    (" --no-shared-storage", ""),
    ("--bf16 \\\n    --norm-topk-prob\n", "--bf16\n"),
    ("'--seq-aux'", "--moe-router-load-balancing-type seq_aux_loss"),
]


def test_a_script_is_edited_in_place(tmp_path):
    found, expected = read_script(SCRIPT), SCRIPT
    for before, after in EDITS:
        assert expected.count(before) == 1, before
        expected = expected.replace(before, after)
    assert found.text == expected
    assert found.others == ("--own-flag",)
    unknown = [step.line for step in found.translation.steps if step.outcome == "unknown value"]
    assert unknown == [
        "--adaptive-recompute-device-size stays as it is: only the shell knows $(cat level); it is translated when the "
        "script runs"
    ]
    script = tmp_path / "script.sh"
    script.write_text(found.text)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_shell_sees_the_translated_words(tmp_path):
    """The words that the program gets, as bash makes them of arrays and of texts that it splits."""
    script = (
        'A=(\n  --noop-layers 3 --num-layers 4\n  --pipeline-model-parallel-size 2\n)\nB="\n  --norm-topk-prob \\\n"\n'
    )
    run = f'{read_script(script).text}printf "%s\\n" "${{A[@]}}" $B\n'
    printed = subprocess.run(["bash", "-c", run], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert printed.split("\n")[:-1] == [
        "--pipeline-model-parallel-layout", "Et*2|t*1L", "--num-layers", "3", "--pipeline-model-parallel-size", "2"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "",
        "echo hi\n",
        "torchrun -m mindspeed_lite run x.py --bf16 \\\n  --num-layers 4\n",
        "python tools/preprocess.py --input x\n",
        "A=(\n--bf16 # --seq-aux\n)",
        "a='unclosed --bf16",
        "echo $(date",
        'x="${y:-\'}"\n',
    ],
)
def test_a_script_without_mindspeed_flags_stays_as_it_is(text):
    assert read_script(text).text == text


def test_a_flag_in_quotes_of_its_own_goes_with_them():
    """If left, they would be an empty argument, and two words in them one argument."""
    text = 'A=(\'--moe-unperm2-mem-optim\' --bf16 "--multi-head-latent-attention" "--yarn-scaling-factor" 40)\n'
    assert read_script(text).text == "A=( --bf16 --multi-latent-attention --rotary-scaling-factor 40)\n"
    nested = 'A="\n  --seed 1 --num-layer-list "1,2"\n"\nB="--num-layers 3 --pipeline-model-parallel-size 2"\n'
    layout = "--pipeline-model-parallel-layout Et*1|t*2L"
    assert read_script(nested).text == nested.replace('--num-layer-list "1,2"', layout)
    kept = 'echo x.py \'--bf16\' "--own-flag" "--use-mc2"x\n'
    assert "--own-flag" in read_script(kept).others and read_script(kept).text.startswith(kept[:36])


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("torchrun $X pretrain.py a.py", "torchrun $X -m mindspeed_lite run pretrain.py a.py"),
        ("python3 -m torch.distributed.launch pretrain.py", "python3 -m torch.distributed.run -m mindspeed_lite run "
         "pretrain.py"),
        ("cd x && python pretrain_gpt.py; python other.py", "cd x && python -m mindspeed_lite run pretrain_gpt.py; "
         "python other.py"),
        ("a=1 /bin/torchrun \\\n  '/x y/own.py'", "a=1 /bin/torchrun \\\n  -m mindspeed_lite run '/x y/own.py'"),
    ],
)  # fmt: skip
def test_a_launch_command_starts_through_run(given, written):
    found = read_script(given)
    assert found.text == written and found.changed == 1
    assert read_script(written).text == written


def test_the_flags_of_the_parser_are_known():
    """A flag that neither the parser nor the table has is named; what the launcher reads stays."""
    found = read_script("torchrun --nnodes 1 x.py --no-such 1 --seed 1 --bf16\n", known={"--seed"})
    assert found.others == ("--no-such",)
    assert [step.outcome for step in found.translation.steps] == ["kept", "kept", "refused"]
    assert "this release of Megatron-core does not have it" in found.translation.refusals[0]


def test_the_import_line_of_a_python_script():
    text = (
        "import os\nimport mindspeed.megatron_adaptor\n  from mindspeed import megatron_adaptor as m  # first\n"
        "import mindspeed.megatron_adaptors\nfrom mindspeed_llm import megatron_adaptor\n"
    )
    found = read_script(text + "from mindspeed_llm.training import pretrain\n", is_python=True)
    assert found.changed == 3 and found.text.startswith(
        text.replace("import mindspeed.megatron_adaptor\n", "import mindspeed_lite.megatron_adaptor\n")
        .replace("from mindspeed import", "from mindspeed_lite import")
        .replace("from mindspeed_llm import", "from mindspeed_lite import")
    )
    assert found.others == ("mindspeed.megatron_adaptors", "mindspeed_llm.training")
