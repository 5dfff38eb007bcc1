"""The command `tpi pack`."""

from pathlib import Path

import click

from tpi.config import default_cache
from tpi.paths import DIRECTORY, PATH


@click.command()
@click.argument("source")
@click.option("-o", "--output", required=True, type=PATH, help="Directory to write, a new one.")
@click.option("--dtype", default="auto", type=click.Choice(["auto", "f32", "bf16", "q8", "q4", "q4s"]),
              help="Format of the weights; auto uses the source's format.")  # fmt: skip
@click.option("--cache", type=DIRECTORY, help="Where models are kept (default: ~/.cache/tpi).")
def pack(source: str, output: Path, dtype: str, cache: Path | None) -> None:
    """Write the model SOURCE (as for -m) as a pack, which opens at once and can be copied to other machines."""
    from tpi.errors import UsageError
    from tpi.pack.builder.build import open_source, pack_model
    from tpi.pack.builder.repair import record_new_pack
    from tpi.pack.library.locate import identity, locate
    from tpi.pack.library.record import PackRecord
    from tpi.pack.reader import Pack

    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise UsageError(f"{output} exists; give -o a directory that does not exist")
    located = locate(source, cache or default_cache())
    if located.kind == "pack":
        raise UsageError(f"{source} is already a pack; use it as it is")
    pack_model(open_source(located.path), dtype, output)
    origin = located.path.absolute()
    record = PackRecord(cache or default_cache(), output.absolute(), str(origin), dtype, identity(origin, dtype))
    record_new_pack(record)
    made = Pack.open(output)
    click.echo(f"{output}: {made.weight_bytes / 1e6:.0f} MB of weights in {len(made.blocks)} files")
