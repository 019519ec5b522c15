"""The command line: `vitprobe run | list | claims | train | runs | probe | show | report`."""

import ast
import dataclasses
import functools
import importlib
import inspect
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
import xarray as xr
from tyro.conf import OmitArgPrefixes, Positional, UseCounterAction, arg

from vitprobe.claims import CLAIMS, overview
from vitprobe.names import require_device, unknown
from vitprobe.study import Scale, Settings, exit_code, find_verdicts, one_after_the_other, run_study, write_claims

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor, nn


def studies_root() -> Path:
    """The folder that holds `studies/`: the checkout, or the copy inside an installed package."""
    package = Path(__file__).parent
    checkout = package.parent
    return checkout if (checkout / "studies").is_dir() else package / "_studies"


def list_studies() -> list[str]:
    """Every study by its name, `paper/figure`."""
    scripts = (studies_root() / "studies").glob("*/*.py")
    return sorted(f"{s.parent.name}/{s.stem}" for s in scripts if "\nSTUDY = " in s.read_text())


def find_study(name: str) -> Any:
    """The study of a name, or of a script of one's own.

    Args:
        name: `paper/figure`, or the path of a script that defines `STUDY`.

    Returns:
        The study.

    Raises:
        ValueError: if there is none.
    """
    script = Path(name)
    if script.suffix == ".py" and script.is_file():
        # By its own folder and name, so that worker processes can import it too.
        sys.path.insert(0, str(script.resolve().parent))
        module = importlib.import_module(script.stem)
    elif name in (known := list_studies()):
        if str(studies_root()) not in sys.path:
            sys.path.insert(0, str(studies_root()))
        module = importlib.import_module("studies." + name.replace("/", "."))
    else:
        papers = {study.partition("/")[0] for study in known}
        raise unknown("study", name, [*known, *papers])
    if not hasattr(module, "STUDY"):
        raise ValueError(f"{name} defines no STUDY: end it with STUDY = vitprobe.study.Study(...).")
    return module.STUDY


def run(study: Annotated[Positional[str], arg(metavar="STUDY")], settings: OmitArgPrefixes[Settings]) -> None:
    """Run a study, or all of a paper: train what is missing, measure, save netCDF, draw, judge.

    Args:
        study: paper/figure, e.g. park_kim/fourier; paper, e.g. park_kim, for all of its studies, one after the other;
            or a script of your own that defines STUDY.
        settings: how big, on what and where.
    """
    if of_paper := [name for name in list_studies() if name.startswith(f"{study}/")]:
        one_after_the_other({name: functools.partial(_run_named, name, settings) for name in of_paper})
    else:
        _run_named(study, settings)


def _run_named(name: str, settings: Settings) -> None:
    run_study(find_study(name), settings)


def list_all(
    what: Annotated[Positional[str], arg(metavar="WHAT")] = "all",
    verbose: Annotated[UseCounterAction[int], arg(aliases=["-v"])] = 0,
) -> None:
    """List studies, models, probes and data sets.

    Args:
        what: studies, models, recipes, probes, data or all.
        verbose: for every model its images, parameters and multiply-adds, half a minute; for every recipe its settings.
    """
    if what not in (kinds := ("studies", "models", "recipes", "probes", "data", "all")):
        raise unknown("list", what, kinds)
    wanted = [kind for kind in kinds if what in (kind, "all")]
    gap = "\n" if what == "all" else ""
    if "studies" in wanted:
        print("studies (vitprobe run STUDY)")
        for name in list_studies():
            print(f"  {name:<24} {find_study(name).title}")
    if "models" in wanted:
        print(f"{gap}models (vitprobe train MODEL)")
        _list_models(bool(verbose))
    if "recipes" in wanted:
        print(f"{gap}recipes (vitprobe train MODEL --recipe ...)")
        _list_recipes(bool(verbose))
    if "probes" in wanted:
        from vitprobe.probes import CHANGE_PROBES, FEATURE_PROBES, IMAGE_PROBES, LOSS_PROBES

        print(f"{gap}probes (vitprobe probe MODEL --probes ...)")
        for name, probe_class in sorted(FEATURE_PROBES.items()):
            print(f"  {name:<24} {probe_class.title}")
        for name, function in sorted({**LOSS_PROBES, **CHANGE_PROBES, **IMAGE_PROBES}.items()):
            print(f"  {name:<24} {(function.__doc__ or '').splitlines()[0]}")
    if "data" in wanted:
        from vitprobe.data import DATA_NAMES

        print(f"{gap}data (--data)")
        for name in DATA_NAMES:
            print(f"  {name}")


def claims(
    folder: Annotated[Positional[Path], arg(metavar="FOLDER")] = Path("results"),
    scale: Scale | None = None,
) -> None:
    """Show what studies found of the published claims, and write it to claims.md.

    Args:
        folder: results of studies, at any depth; claims.md goes here, with the verdicts of the cpu and paper scales,
            which alone are evidence.
        scale: show the verdicts of this scale only; those of a small one are written too, as claims_quick.md.
    """
    judged = find_verdicts(folder, deep=True)
    shown = [one for one in judged if scale in (None, one.scale)]
    print(overview(shown, CLAIMS, width=shutil.get_terminal_size((200, 24)).columns), end="")
    print(write_claims(folder, scale or "cpu", judged=judged, registry=CLAIMS))


def _list_models(costs: bool) -> None:
    from vitprobe.models import describe_model, list_models, model_cost

    if costs:
        print("  for 10 classes: image, parameters, multiply-adds of convolutions and matrix products per image")
    for name in list_models():
        columns = ""
        if costs:
            cost = model_cost(name, **({"image_size": 8} if name.endswith("_nano") else {}))
            image = "x".join(map(str, cost.image_size))
            columns = f"{image:>7} {cost.parameters / 1e6:7.3f} M {cost.multiply_adds / 1e6:9.1f} M  "
        # Each line as it is found: they take a third of a second.
        print(f"  {name:<24} {columns}{describe_model(name)}", flush=costs)


def _list_recipes(settings: bool) -> None:
    from vitprobe.training import RECIPES, Recipe

    default = Recipe().config()
    for name, one in RECIPES.items():
        print(f"  {name:<24} {one.source}")
        if not settings:
            continue
        if one.notes:
            print(f"    {one.notes}")
        if one.scaled_from:
            changed = one.changes()
            print(f"    changed: {', '.join(f'{key} {new!r} (was {old!r})' for key, (old, new) in changed.items())}")
        else:
            own = {key: value for key, value in one.recipe.config().items() if value != default[key]}
            print(f"    {', '.join(f'{key}={value!r}' for key, value in own.items())}")


def runs(folder: Annotated[Positional[Path | None], arg(metavar="FOLDER")] = None) -> None:
    """List what is trained, running or stopped, and where.

    Args:
        folder: where to look, at any depth; the cache of trained runs unless given.
    """
    from vitprobe.results import cache_folder
    from vitprobe.runs import list_runs

    table = list_runs(folder)
    where = cache_folder() if folder is None else folder
    if table.empty:
        print(f"no runs below {where}")
        return
    table["epoch"] = table.epoch.astype(str) + "/" + table.epochs.astype(str)
    accuracy = table.test_accuracy.map("{:.1%}".format, na_action="ignore").fillna("")
    print(table.assign(test_accuracy=accuracy).drop(columns="epochs").to_string(index=False))
    counts = table.state.value_counts()
    print(f"{', '.join(f'{counts[state]} {state}' for state in counts.index)}; below {where}")


def probe(
    model: Annotated[Positional[str], arg(metavar="MODEL")],
    output: Annotated[Path, arg(aliases=["-o"])],
    data: str = "digits",
    probes: str = "fourier,feature_variance",
    checkpoint: Path | None = None,
    data_root: Path | None = None,
    download: bool = True,
    split: str = "test",
    images: int | None = None,
    image_size: int | None = None,
    mean: str | None = None,
    std: str | None = None,
    batch_size: int = 64,
    layers: str = "auto",
    prefix: int | None = None,
    option: Annotated[list[str], tyro.conf.UseAppendAction] = [],  # noqa: B006  (tyro's way; never changed)
    seed: int = 0,
    device: str | None = None,
) -> None:
    """Probe a model of your own: a folder with a page, figures and netCDF files, or netCDF files alone.

    Every file is written as soon as its measurement is done. The same command goes on after an interruption.

    Args:
        model: the folder of a trained run, module:function that returns the model (the current folder is searched),
            timm:NAME, torchvision:NAME, or a name from `vitprobe list`.
        output: a folder for index.html and a netCDF file and figure per probe; or, with .nc, a netCDF file alone, to
            whose name that of the probe is added where there are several (out_fourier.nc).
        data: images to probe on, as in `vitprobe train`.
        probes: names from `vitprobe list`, separated by commas; all stands for those that share one pass, less those
            that have nothing to measure here, e.g. all,hessian_eigenvalues.
        checkpoint: weights to load into the model.
        data_root: folder of downloaded data sets.
        download: fetch a data set that is not in its folder.
        split: train or test; of a folder without splits the test is the last fifth of each class, and train the others.
        images: use this many images, balanced over the classes.
        image_size: resize the images to this many pixels a side.
        mean: what the model wants taken off each channel of pixels in 0..1, e.g. 0.485,0.456,0.406; the data set's own
            unless given.
        std: what it wants them divided by then, e.g. 0.229,0.224,0.225; the data set's own unless given.
        batch_size: images in a pass.
        layers: auto finds the residual units; glob patterns of module paths, separated by commas, take their outputs.
        prefix: number of class and register tokens, where the inference is wrong.
        option: an argument of the probes, e.g. --option definition=paper or --option k=10, for each of them that
            takes it; may be repeated.
        seed: of the weights, where no checkpoint is given.
        device: cpu, cuda or cuda:1; the GPU if there is one unless given.
    """
    import torch

    from vitprobe.data import load_data
    from vitprobe.data.split import Split, subset
    from vitprobe.probes import CHANGE_PROBES, FEATURE_PROBES, IMAGE_PROBES, LOSS_PROBES
    from vitprobe.probes import probe as run_probes
    from vitprobe.results import save
    from vitprobe.training import load_weights

    functions = {**LOSS_PROBES, **CHANGE_PROBES, **IMAGE_PROBES}
    known: dict[str, Callable[..., Any]] = {**FEATURE_PROBES, **functions}
    named = [name.strip() for name in probes.split(",")]
    for name in named:
        if name not in (*known, "all"):
            raise unknown("probe", name, (*known, "all"))
    names = list(dict.fromkeys(one for name in named for one in (FEATURE_PROBES if name == "all" else [name])))
    sharing = [name for name in names if name in FEATURE_PROBES]
    given = _options_by_probe(parse_options(option), {name: known[name] for name in names})
    measurements = [FEATURE_PROBES[name](**given[name]) for name in sharing]
    paths = _output_paths(output, names)
    own_images = [name for name in names if name in IMAGE_PROBES]
    if own_images and image_size is not None:
        raise ValueError(f"{own_images[0]} makes images of its own, of the data's size: leave out --image-size.")
    if image_size is not None and image_size < 1:
        raise ValueError(f"--image-size {image_size} is no size: give 1 or more pixels, or leave it out.")
    require_device(device)
    if split not in ("train", "test"):
        raise ValueError(f"split is train or test, not {split!r}.")
    image_data = load_data(data, root=data_root, download=download)
    chosen: Split = getattr(image_data, split)
    if images is not None:
        chosen = subset(chosen, images, image_data.class_names, "--images")
    print(f"{len(chosen)} images of the {split} split of {data}", file=sys.stderr)
    image_data = dataclasses.replace(
        image_data,
        train=chosen if split == "train" else image_data.train,
        test=chosen if split == "test" else image_data.test,
        mean=image_data.mean if mean is None else _numbers("mean", mean),
        std=image_data.std if std is None else _numbers("std", std),
    )
    network = _build(model, image_size or image_data.image_size, image_data.channels, image_data.num_classes, seed)
    if checkpoint is not None:
        load_weights(network, checkpoint)
    network.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    batches: Any = image_data.loader(split, batch_size=batch_size)
    if image_size is not None:
        batches = _Resized(batches, image_size)
    said: dict[str, Any] = {
        "model": model,
        "data": _without_folders(data),
        "split": split,
        "normalisation_mean": ", ".join(f"{value:.4g}" for value in image_data.mean),
        "normalisation_std": ", ".join(f"{value:.4g}" for value in image_data.std),
        **({} if checkpoint is None else {"checkpoint": checkpoint.name}),
    }
    where: dict[str, Any] = {
        "layers": layers if layers == "auto" else [pattern.strip() for pattern in layers.split(",")],
        "prefix": prefix,
    }
    # What makes images of its own does so of the data set's test images, before they are normalised.
    source = image_data if split == "test" else dataclasses.replace(image_data, test=image_data.train)
    done: dict[str, xr.Dataset] = {}

    def keep(name: str, ds: xr.Dataset) -> None:
        done[name] = ds.assign_attrs(said)
        print(save(done[name], paths[name]))

    left_out: dict[str, str] = {}
    if sharing:
        tree = run_probes(network, batches, measurements, missing="skip" if "all" in named else "raise", **where)
        left_out = json.loads(tree.attrs.get("left_out", "{}"))
        note = {"left_out": tree.attrs["left_out"]} if left_out else {}
        for name, child in tree.children.items():
            keep(name, child.to_dataset().assign_attrs(note))
        for reason in left_out.values():
            print(f"left out: {reason}")
        if wanted := [name for name in named if name in left_out]:
            raise ValueError(left_out[wanted[0]])
    for name in (name for name in names if name in functions):
        takes = inspect.signature(functions[name]).parameters
        flags = {"path": paths[name], "batch_size": batch_size, **where}
        fitting = {key: value for key, value in flags.items() if key in takes}
        inputs = source if name in IMAGE_PROBES else batches
        keep(name, functions[name](network, inputs, **(fitting | given[name])))
    if output.suffix != ".nc":
        from vitprobe.report import write_report

        print(write_report(done, output, left_out=left_out))


def _options_by_probe(
    options: Mapping[str, Any], probes: Mapping[str, Callable[..., Any]]
) -> dict[str, dict[str, Any]]:
    """The options of each probe: a class takes them to be made, a function to be called."""
    # What flags say, or nobody can type.
    elsewhere = {"model", "batches", "source", "batch_size", "layers", "prefix", "path", "forward", "progress"}
    typed = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    takes = {
        name: {
            key: one.default
            for key, one in inspect.signature(probe).parameters.items()
            if one.kind in typed and key not in elsewhere
        }
        for name, probe in probes.items()
    }
    for given in options:
        if not any(given in keys for keys in takes.values()):
            known = sorted({key for keys in takes.values() for key in keys})
            raise ValueError(
                f"none of the probes {', '.join(probes)} takes an option {given!r}; known: {known or 'none'}."
            )
    for name, keys in takes.items():
        if wanted := [
            key for key, default in keys.items() if default is inspect.Parameter.empty and key not in options
        ]:
            raise ValueError(f"{name} needs to be told {wanted[0]}: add --option {wanted[0]}=VALUE.")
    return {name: {key: value for key, value in options.items() if key in keys} for name, keys in takes.items()}


def _output_paths(output: Path, names: Sequence[str]) -> dict[str, Path]:
    """The netCDF file of every probe."""
    if output.suffix == ".nc":
        return {name: output if len(names) == 1 else output.with_name(f"{output.stem}_{name}.nc") for name in names}
    _check_folder(output)
    return {name: output / f"{name}.nc" for name in names}


def _check_folder(output: Path) -> None:
    """That an output that is no netCDF file is meant as a folder, and can be one."""
    if output.is_file() or (output.suffix and not output.is_dir()):
        raise ValueError(
            f"{output} is no place for results: use -o {output.with_suffix('.nc')} for netCDF files alone, or "
            f"-o {output.with_suffix('')} for a folder with a page."
        )


def _without_folders(data: str) -> str:
    """A data set as it was asked for, less the folders of its files, which are of one machine only."""
    kind, colon, argument = data.partition(":")
    return kind + colon + ",".join(Path(part).name for part in argument.split(","))


def _numbers(what: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--{what} {text!r} is not a number per channel: use e.g. --{what} 0.5,0.5,0.5.") from None


def show(
    file: Annotated[Positional[Path], arg(metavar="FILE")],
    output: Annotated[Path | None, arg(aliases=["-o"])] = None,
) -> None:
    """Draw a netCDF file of vitprobe as a PNG beside it: a study's as the study draws it.

    Args:
        file: what a study or a probe saved.
        output: the PNG; the file's name with .png unless given.
    """
    from vitprobe.figures import FIGURES, draw, save_figure
    from vitprobe.results import load

    ds = load(file)
    own = _drawing(ds)
    if str(ds.attrs.get("title", "")).startswith("Training history"):
        raise ValueError(
            f"{file} is the history of a training, of which there is no figure: vitprobe report {file} -o FOLDER makes"
            " a page of its values."
        )
    if own is None and ds.attrs.get("study") and ds.attrs.get("probe") not in FIGURES:
        raise ValueError(
            f"{file} is of the study {ds.attrs['study']}, which is not here (vitprobe list studies), and of no single "
            "probe: run the study's script again, which repeats no measurement and draws."
        )
    figure = (own or draw)(ds)
    print(save_figure(figure, output or file.with_suffix(".png")))


def _drawing(ds: xr.Dataset) -> "Callable[[xr.Dataset], Figure] | None":
    """What draws a dataset of a study, if that is here."""
    name = ds.attrs.get("study", "")
    return find_study(name).draw if name in list_studies() else None


def report(
    files: Annotated[Positional[list[Path]], arg(metavar="FILES")],
    output: Annotated[Path, arg(aliases=["-o"])],
) -> None:
    """Make a page of netCDF files of vitprobe: figures, values and provenance in one index.html.

    Args:
        files: what studies and probes saved, or folders of it.
        output: a folder for index.html, the figures, and those of the netCDF files that are elsewhere.
    """
    from vitprobe.report import write_report
    from vitprobe.results import load

    _check_folder(output)
    if not files:
        raise ValueError("there is nothing to report: give netCDF files, or folders of them.")
    found: dict[str, Path] = {}
    for given in files:
        parts = sorted(given.glob("*.nc")) if given.is_dir() else [given]
        if not parts:
            raise FileNotFoundError(f"no netCDF files (*.nc) in {given}.")
        for file in parts:
            if found.setdefault(file.stem, file) != file:
                raise ValueError(
                    f"{found[file.stem]} and {file} have one name, and a page has one of each: rename one."
                )
    print(write_report({name: load(file) for name, file in found.items()}, output, drawn_by=_drawing))


def _train_without_flags() -> None:
    """Train a network and keep it in a folder; the same command goes on after an interruption."""


COMMANDS: dict[str, Callable[..., None]] = {
    "run": run,
    "list": list_all,
    "claims": claims,
    "train": _train_without_flags,
    "runs": runs,
    "probe": probe,
    "show": show,
    "report": report,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The `vitprobe` command.

    Args:
        arguments: the command line, without the program; `sys.argv` unless given.

    Returns:
        The exit code: 0, 1 for failed runs, 2 for bad input, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)

    def run_command() -> None:
        commands = COMMANDS
        if "train" in arguments[:1]:
            # Its flags are the recipe's, whose type costs the import of torch; the other commands start without.
            from vitprobe.cli_train import train_by

            commands = {**COMMANDS, "train": train_by(arguments)}
        tyro.extras.subcommand_cli_from_dict(
            commands,
            prog="vitprobe",
            description="How does this vision network work? Train, probe, and check what four papers say.",
            args=arguments,
            sort_subcommands=False,
        )

    return exit_code(run_command)


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """What `--option NAME=VALUE` says, values as Python reads them, or as text.

    Args:
        pairs: each `NAME=VALUE`.

    Raises:
        ValueError: if one has no value.
    """
    options = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--option {pair!r} has no value: use NAME=VALUE, e.g. patch_size=2.")
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[name] = text
    return options


def _build(spec: str, image_size: int | tuple[int, int], channels: int, num_classes: int, seed: int) -> "nn.Module":
    """The model of `module:function`, `timm:NAME`, `torchvision:NAME`, or a name of ours."""
    import torch
    from torch import nn

    from vitprobe.models import create_model, list_libraries

    if Path(spec).is_dir():
        from vitprobe.runs import load_run

        return load_run(spec)
    source, colon, name = spec.partition(":")
    if not colon or source in list_libraries():
        return create_model(spec, image_size=image_size, channels=channels, num_classes=num_classes, seed=seed)
    torch.manual_seed(seed)
    sys.path.insert(0, str(Path.cwd()))
    module = importlib.import_module(source)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{source} has no function {name!r} that returns a model.")
    model = function()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{spec} returned {type(model).__name__}, not a torch.nn.Module.")
    return model


class _Resized:
    """A loader whose images are resized, bicubic and antialiased."""

    def __init__(self, loader: Any, size: int) -> None:
        self.loader = loader
        self.size = size
        self.description = loader.description

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        import torch.nn.functional as F

        def resize(x: "Tensor") -> "Tensor":
            return F.interpolate(x, size=(self.size, self.size), mode="bicubic", antialias=True)

        return ((resize(x), y) for x, y in self.loader)
