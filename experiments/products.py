"""Matrix products over both matrices' sizes: the CPU's speed, and from which sizes on a GPU is faster."""

from __future__ import annotations

from .lab import Lab
from .page import NOT_MEASURED, Claim, Page, Section
from .products_page import crossovers, factor, ratio_figure, speed_figure, times
from .products_runs import PUBLISHED, SLOWER, Measured, Products, Size, flops, measure, overtakes, ratios, text

WITHIN = 2.0  # Of the published second matrix's rows and columns: a crossover so near is still called there.
_PLACE = text(PUBLISHED)


def run(lab: Lab) -> Page:
    """Measures all devices, by turns."""
    products = measure(lab)
    return Page(
        title="Matrix products on CPU and GPU",
        finding=_finding(products),
        lead=_lead(products),
        claims=[_claim(products, with_copies=False), _claim(products, with_copies=True)],
        sections=[_cpu(products), _threads(products), _gpu(products), _crossovers(products)],
    )


def _lead(products: Products) -> str:
    grid = products.grid
    largest = (grid.rows[-1], *grid.seconds[-1])
    cells = f"{len(grid.sizes)} sizes up to {text(largest)}"
    repeats = "a median over repeats" + (f" and {products.rounds} rounds" if products.rounds > 1 else "")
    return (
        "A product of two small matrices is faster on the CPU: a GPU needs a while to begin, and the matrices have to "
        f"get there. Published is that the GPU is the faster one from {_PLACE} on. `ps_bench gemm --grid` multiplies "
        f"float32 matrices, m × k by k × n, of {cells}, in doublings around the published size: k and n grow together, "
        "in the proportion of 3 to 2. It checks all elements of each product. A time is "
        f"{repeats}, in an order in which all devices take turns. The CPU's products are oneDNN's, those of the "
        "workers; they need no copies. On a GPU they are cuBLASLt's."
    )


def _finding(products: Products) -> str:
    cpu_s = products.one_thread.product_s[PUBLISHED]
    said = f"At {_PLACE} a CPU thread takes {1e6 * cpu_s:.1f} µs"
    if products.gpu is None:
        return f"{said} and a GPU was {NOT_MEASURED} (published: from there on the GPU is faster)."
    ratio = products.gpu.product_s[PUBLISHED] / cpu_s
    return f"{said} and the GPU {factor(ratio)} times as long (published: from there on the GPU is faster)."


def _claim(products: Products, with_copies: bool) -> Claim:
    what = "product from which on the GPU is faster, " + ("with the copies" if with_copies else "without copies")
    cpu_s = products.one_thread.product_s[PUBLISHED]
    if products.gpu is None:
        why = (
            f"No GPU: {products.no_gpu}. One thread of this CPU takes {1e6 * cpu_s:.1f} µs for the published product; "
            "a GPU would have to begin and end it"
            + (" and copy three matrices" if with_copies else "")
            + " in less, to be faster there."
        )
        return Claim(what, _PLACE, NOT_MEASURED, None, why)
    gpu = _ratio(products, products.gpu, with_copies)
    at, m = gpu[PUBLISHED], PUBLISHED[0]
    found, grid = overtakes(products.grid, gpu, m), products.grid
    ours = f"with {m} rows " + (f"from {text((m, *found))} on" if found else f"none up to {_largest(products, m)}")
    agrees: bool | None = found is not None and 1 / WITHIN <= found[0] / PUBLISHED[1] <= WITHIN
    place = f"Its crossover is {'' if agrees else 'not '}within a factor of {WITHIN:g} of the published sizes."
    if found is None:
        place = "It has no crossover here."
    elif found == grid.seconds[0]:
        agrees, place = None, "It is faster with all second matrices here, so that its crossover may be below them."
    why = (
        f"{place} At the published size the GPU takes {factor(at)} times as long as one thread of this CPU. The "
        "published CPU and GPU were others, and only the place from which on the GPU is faster is compared."
    )
    return Claim(what, _PLACE, ours, agrees, why)


def _largest(products: Products, m: int) -> str:
    return text((m, *products.grid.seconds[-1]))


def _ratio(products: Products, gpu: Measured, with_copies: bool) -> dict[Size, float]:
    """The CPU has no copies to make."""
    return ratios(products.one_thread.product_s, gpu.with_copies_s if with_copies else gpu.product_s)


def _cpu(products: Products) -> Section:
    speeds = {size: flops(size) / seconds / 1e9 for size, seconds in products.one_thread.product_s.items()}
    best = max(speeds, key=lambda size: speeds[size])
    here = speeds[PUBLISHED]
    paragraph = (
        f"One thread makes {here:.0f} GFLOP/s of the published product, {here / speeds[best]:.0%} of the most that it "
        f"makes of any size here ({speeds[best]:.0f}, of {text(best)}). The smaller a product, the more of its time "
        "goes into the call, and into edges that do not fill the processor's registers."
    )
    plot = speed_figure(products, products.one_thread, "cpu", "CPU, one thread")
    return Section("The CPU alone", [paragraph], [times(products)], [plot])


def _threads(products: Products) -> Section:
    title = "More than one thread"
    if products.all_threads is None:
        return Section(title, [f"{_sentence(NOT_MEASURED)}: this machine has one core."])
    number = products.threads
    ratio = ratios(products.one_thread.product_s, products.all_threads.product_s)
    faster = sum(value < 1 for value in ratio.values())
    paragraph = (
        f"With `--threads={number}`, as many as there are cores, the same question arises on the CPU alone: threads "
        f"have to be woken and waited for, which small products do not repay. {faster} of {len(ratio)} products are "
        f"faster; the best takes {factor(min(ratio.values()))} times as long as with one thread, the worst "
        f"{factor(max(ratio.values()))} times. Where other processes want the cores too, as several workers on one "
        "machine do, threads wait for each other far longer; a worker's default is one."
    )
    plot = ratio_figure(
        products,
        ratio,
        "threads",
        f"Time with {number} threads, times that with one",
        f"the product with {number} threads",
    )
    return Section(title, [paragraph], figures=[plot])


def _gpu(products: Products) -> Section:
    title = "CPU and GPU"
    if products.gpu is None:
        return Section(title, [f"{_sentence(NOT_MEASURED)}: {products.no_gpu}."])
    figures = [speed_figure(products, products.gpu, "gpu", "GPU")]
    for with_copies, name in ((False, "without copies"), (True, "with copies")):
        plot = ratio_figure(
            products,
            _ratio(products, products.gpu, with_copies),
            f"gpu-{'copies' if with_copies else 'alone'}",
            f"Time on the GPU, {name}, times that of one CPU thread",
            "the GPU",
        )
        figures.append(plot)
    paragraph = (
        "Without copies, a GPU's time is that of one of many products that are queued at once, by its own clock. With "
        "copies it is the host's time for both operands to the GPU, the product, and the result back."
    )
    return Section(title, [paragraph], figures=figures)


def _crossovers(products: Products) -> Section:
    alone, together, gpu = products.one_thread, products.all_threads, products.gpu
    threads = None if together is None else ratios(alone.product_s, together.product_s)
    columns = {
        "GPU, without copies": None if gpu is None else _ratio(products, gpu, False),
        "GPU, with copies": None if gpu is None else _ratio(products, gpu, True),
        "more threads": threads,
    }
    paragraph = (
        "All are compared with one thread of the CPU. A size counts only if all larger second matrices, with as many "
        f"rows of the first one, are faster too, or slower by {SLOWER:.0%} at most."
    )
    return Section("From which size on", [paragraph], [crossovers(products, columns)])


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]
