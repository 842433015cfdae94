"""Every model of a zoo through the mill: analyse, remove 30 % and 70 % at random, compare with masking, save, load.

    python -m benchmarks.zoo torchvision            all classification models
    python -m benchmarks.zoo torchvision --smallest  one per family, with ONNX
    python -m benchmarks.zoo timm                    one per family, smallest member
    python -m benchmarks.zoo timm --plain --only …   with standardised weights as numbers (`plain_convolutions`)
    python -m benchmarks.zoo timm --units            only the share of units that may leave
    python -m benchmarks.zoo --hf                    all families of transformers, tiny (benchmarks/zoo_transformers.py)
    python -m benchmarks.zoo --beyond                what does not classify images (benchmarks/zoo_beyond.py)

Weights are random, with random BatchNorm statistics and non-zero biases, so that mistakes show. Results are appended
to a JSON-lines file as they come (`--out`), so that an interrupted run goes on where it stopped; the table is printed
at the end.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.integrations.timm import plain_convolutions

TORCHVISION_SMALLEST = [
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "resnet18",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "swin_t",
    "swin_v2_t",
    "vgg11",
    "vgg11_bn",
    "vit_b_16",
]

TIMM_SMALLEST = [
    "beit_base_patch16_224",
    "botnet26t_256",
    "caformer_s18",
    "cait_xxs24_224",
    "coat_tiny",
    "coatnet_0_224",
    "convit_tiny",
    "convmixer_768_32",
    "convnext_atto",
    "convnextv2_atto",
    "crossvit_tiny_240",
    "cs3darknet_s",
    "cspresnet50",
    "davit_tiny",
    "deit_tiny_patch16_224",
    "densenet121",
    "dla34",
    "dm_nfnet_f0",
    "dpn48b",
    "edgenext_xx_small",
    "efficientformer_l1",
    "efficientformerv2_s0",
    "efficientnet_lite0",
    "efficientvit_b0",
    "efficientvit_m0",
    "eva02_tiny_patch14_224",
    "fastvit_t8",
    "focalnet_tiny_srf",
    "gcvit_xxtiny",
    "gernet_s",
    "ghostnet_050",
    "ghostnetv2_100",
    "gmlp_ti16_224",
    "hardcorenas_a",
    "hgnet_tiny",
    "hiera_tiny_224",
    "hrnet_w18_small",
    "inception_next_tiny",
    "lcnet_050",
    "levit_128s",
    "mambaout_femto",
    "maxvit_nano_rw_256",
    "mixer_s32_224",
    "mobilenetv4_conv_small",
    "mobileone_s0",
    "mobilevit_xxs",
    "mobilevitv2_050",
    "mvitv2_tiny",
    "nf_regnet_b0",
    "nfnet_l0",
    "pit_ti_224",
    "poolformer_s12",
    "pvt_v2_b0",
    "regnetx_002",
    "repghostnet_050",
    "repvgg_a0",
    "repvit_m0_9",
    "res2net50_14w_8s",
    "resmlp_12_224",
    "resnest14d",
    "resnetv2_50",
    "rexnet_100",
    "rdnet_tiny",
    "sebotnet33ts_256",
    "selecsls42",
    "seresnet18",
    "skresnet18",
    "starnet_s1",
    "swiftformer_xs",
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "tiny_vit_5m_224",
    "tinynet_e",
    "tresnet_m",
    "twins_pcpvt_small",
    "vgg11",
    "visformer_tiny",
    "vit_tiny_patch16_224",
    "volo_d1_224",
    "vovnet39a",
    "xception41",
    "xcit_nano_12_p16_224",
]


def randomise(model: nn.Module) -> nn.Module:
    """Random BatchNorm statistics and non-zero biases and scales."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(0, 0.1) if name.endswith("bias") else parameter.uniform_(0.5, 1.5)
    return model


def rows_in(log: Path | None) -> dict[str, dict[str, Any]]:
    """What an earlier run found, by model."""
    lines = log.read_text().splitlines() if log is not None and log.exists() else []
    return {row["model"]: row for row in map(json.loads, lines)}


def keep(log: Path | None, row: dict[str, Any]) -> None:
    """Say how a row came out, and add it to the log."""
    state = row.get("error") or row.get("unbuilt") or ("ok" if row.get("ok") else f"NOT OK {row}")
    print(f"{row['model']}: {state[:400]} ({row.get('seconds', '?')} s)", flush=True)
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(json.dumps(row) + "\n")


def torchvision_models() -> list[str]:
    import torchvision

    return [n for n in torchvision.models.list_models(module=torchvision.models) if not n.startswith("quantized")]


def make(zoo: str, name: str, size: int | None, plain: bool = False) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if zoo == "torchvision":
        import torchvision

        extra = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        model = torchvision.models.get_model(name, **extra)
        fixed = name.startswith(("vit", "maxvit", "swin"))
        size = 224 if fixed or size is None else max(size, 96 if name == "inception_v3" else 64)
    else:
        import timm

        model = timm.create_model(name, pretrained=False)
        size = model.default_cfg["input_size"][-1]
    model = randomise(model).eval()
    return plain_convolutions(model) if plain else model, torch.randn(1, 3, size, size)


def mill(zoo: str, name: str, size: int | None, onnx: bool, plain: bool = False) -> dict[str, Any]:
    """One model; the row of the table."""
    model, example = make(zoo, name, size, plain)
    row: dict[str, Any] = {"model": name, "input": example.shape[-1]}
    before = [(n, t.clone()) for n, t in model.state_dict().items()]
    begin = time.perf_counter()
    graph = sc.analyze(model, example)
    row["analyze_s"] = round(time.perf_counter() - begin, 2)
    row["units"], row["prunable"] = int(graph.units.sum()), graph.total_units
    row["frozen"] = sorted({layer.reason for layer in graph.layers if layer.reason and layer.reason != "model output"})
    rng = np.random.default_rng(0)
    scores = sc.Scores("random", {p.sites[0]: rng.random(len(p.labels)) for p in graph.producers})
    begin = time.perf_counter()
    small = None
    for share in (0.3, 0.7):
        try:
            plan = sc.plan(graph, scores, remove=share)
        except sc.SecateurError as error:
            if "at most" not in str(error):
                raise
            row[f"macs_{share}"] = f"target out of reach: {error}"
            continue
        small = sc.apply(model, plan)  # raises unless removal equals masking
        row[f"macs_{share}"] = round(plan.after.macs / plan.before.macs, 3)
        row["cost_exact"] = sc.measure(small, example, latency=False) == plan.after
    row["apply_s"] = round(time.perf_counter() - begin, 2)
    assert small is not None
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        sc.save(small, Path(folder, "m"))
        again = sc.load(Path(folder, "m"), make(zoo, name, size, plain)[0]).eval()
        row["reload_equal"] = all(
            torch.equal(a, b) for a, b in zip(_out(small, example), _out(again, example), strict=True)
        )
        if onnx:
            sc.export(small, Path(folder, "m.onnx"), example)
            row["onnx_equal"] = True
    row["untouched"] = all(torch.equal(t, model.state_dict()[n]) for n, t in before)
    row["ok"] = bool(row["reload_equal"] and row["untouched"] and row["cost_exact"])
    return row


def _out(model: nn.Module, x: Tensor) -> list[Tensor]:
    out = model(x)
    return [out] if isinstance(out, Tensor) else [t for t in out if isinstance(t, Tensor)]


def table(rows: list[dict[str, Any]]) -> str:
    names = ["model", "input", "units that may leave", "analyse s", "2 x apply s", "MACs left at 30 / 70 %"]
    names += ["reload", "ONNX", "ok"]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for r in rows:
        if "error" in r:
            lines.append(f"| {r['model']} | | | | | | | | {r['error'][:160]} |")
            continue
        share = f"{100 * r['prunable'] / max(r['units'], 1):.0f} % of {r['units']}"
        left = " / ".join(
            f"{100 * r[k]:.0f} %" if isinstance(r.get(k), float) else "out of reach" for k in ("macs_0.3", "macs_0.7")
        )
        mark = {True: "equal", False: "**differs**", None: ""}
        lines.append(
            f"| {r['model']} | {r['input']} | {share} | {r['analyze_s']} | {r['apply_s']} | {left} | "
            f"{mark[r['reload_equal']]} | {mark[r.get('onnx_equal')]} | {'yes' if r['ok'] else '**no**'} |"
        )
    good = sum(bool(r.get("ok")) for r in rows)
    lines += ["", f"{good} of {len(rows)} models pass."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", nargs="?", choices=["torchvision", "timm"])
    parser.add_argument("--hf", action="store_true", help="the families of transformers instead")
    parser.add_argument("--beyond", action="store_true", help="detectors, segmenters, video, audio, diffusion instead")
    parser.add_argument("--smallest", action="store_true", help="one member per family, ONNX included")
    parser.add_argument("--only", nargs="*", help="just these models")
    parser.add_argument("--plain", action="store_true", help="convolutions with standardised weights become plain")
    parser.add_argument("--units", action="store_true", help="only the share of units that may leave")
    parser.add_argument("--size", type=int, help="input size for models that take any (torchvision)")
    parser.add_argument("--workers", type=int, default=1, help="models at the same time, for --hf and --beyond")
    parser.add_argument("--seconds", type=float, default=150, help="for one family of transformers at most")
    parser.add_argument("--out", "--log", type=Path, help="rows so far: a later run goes on from there")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.hf:
        from benchmarks import zoo_transformers

        return zoo_transformers.main(options.only, options.out, options.workers, options.seconds)
    if options.beyond:
        from benchmarks import zoo_beyond

        return zoo_beyond.main(options.only, options.out, options.workers)
    if options.zoo is None:
        parser.error("name a zoo, or give --hf or --beyond")
    names = options.only or (
        TIMM_SMALLEST if options.zoo == "timm" else TORCHVISION_SMALLEST if options.smallest else torchvision_models()
    )
    if options.units:
        for name in names:
            graph = sc.analyze(*make(options.zoo, name, options.size, options.plain))
            share = graph.total_units / int(graph.units.sum())
            print(f"{name}: {100 * share:.0f} % of {int(graph.units.sum())} units may leave", flush=True)
        return
    options.out = options.out or Path("out/zoo.jsonl")
    done, rows = rows_in(options.out), []
    for name in names:
        if name not in done:
            begin = time.perf_counter()
            try:
                row = mill(options.zoo, name, options.size, options.smallest, options.plain)
            except Exception as error:
                row = {"model": name, "error": f"{type(error).__name__}: {error}"}
            done[name] = row | {"seconds": round(time.perf_counter() - begin, 1)}
            keep(options.out, done[name])
        rows.append(done[name])
    print()
    print(table(rows))


if __name__ == "__main__":
    main()
