// Cut the layers of a network into checkpointed segments: what is the smallest peak?
import {
  button,
  chart,
  choice,
  details,
  EDGE,
  jumps,
  layout,
  make,
  paragraph,
  pattern,
  percent,
  short,
  slider,
  sum,
  table,
  tick,
} from "./shared.js";

// What is alive at the end of the forward pass, and while backward goes through each segment.
// One unit is the input of a layer. With `keep` the last segment is not computed again.
export function cost(lengths, ratio, keep) {
  const n = lengths.length;
  const layers = sum(lengths);
  const last = lengths[n - 1];
  const instants = [{ segment: 0, inputs: n, inside: keep ? ratio * last : 0 }];
  for (let i = n; i >= 1; i -= 1) {
    instants.push({ segment: i, inputs: i, inside: ratio * lengths[i - 1] });
  }
  const totals = instants.map(({ inputs, inside }) => inputs + inside);
  const peak = Math.max(...totals);
  return {
    instants,
    peak,
    forward: totals[0],
    at: instants[totals.indexOf(peak)].segment,
    runsAgain: keep ? layers - last : layers,
    rule: n + ratio * Math.max(...lengths), // all inputs at once
  };
}

// The smallest peak of all placements: below it the longest segments that it allows hold too few
// layers. The longest segment decides a peak, or one further down.
export function best(layers, ratio) {
  const isEnough = (peak) => {
    let held = 0;
    for (let i = 1; i < peak && i <= layers; i += 1) held += Math.floor((peak - i) / ratio);
    return held >= layers;
  };
  let smallest = Infinity;
  for (let n = 1; n <= layers; n += 1) {
    for (let i = 1; i <= layers; i += 1) {
      const peak = i + ratio * n;
      if (peak >= smallest) break;
      if (isEnough(peak)) smallest = peak;
    }
  }
  return smallest;
}

export function equal(layers, n) {
  const size = Math.ceil(layers / n);
  const lengths = [];
  for (let left = layers; left > 0; left -= size) lengths.push(Math.min(size, left));
  return lengths;
}

// Each segment is one layer shorter than the one before, as far as the layers reach.
export function shorter(layers) {
  let size = 1;
  while ((size * (size + 1)) / 2 < layers) size += 1;
  const lengths = [];
  for (let left = layers; left > 0; left -= size, size -= 1) lengths.push(Math.min(size, left));
  return lengths;
}

// Where segments end, from their lengths; and back.
export function endsOf(lengths) {
  return lengths.map((_, i) => sum(lengths.slice(0, i + 1)));
}

export function lengthsOf(ends) {
  return ends.map((end, i) => end - (i ? ends[i - 1] : 0));
}

// "6 + 3 × 4" for 6, 4, 4, 4.
export function written(lengths) {
  const runs = [];
  for (const length of lengths) {
    const last = runs.at(-1);
    if (last?.length === length) last.n += 1;
    else runs.push({ n: 1, length });
  }
  return runs.map(({ n, length }) => (n > 1 ? `${n} × ${length}` : length)).join(" + ");
}

const PRESETS = [
  ["√L equal segments", (layers) => [equal(layers, Math.round(Math.sqrt(layers))), false]],
  ["one segment per block", (layers) => [equal(layers, layers), false]],
  ["one segment", (layers) => [[layers], false]],
  ["no checkpoints", (layers) => [[layers], true]],
  ["unequal: each one layer shorter", (layers) => [shorter(layers), false]],
];

export function mount(root, data) {
  const { n_layer, ratio: startRatio } = data.start;
  const state = { network: "", layers: n_layer, ratio: startRatio, keep: false, lengths: [] };
  const game = { tries: 0, best: Infinity, goal: NaN };
  let last = ""; // the sentence of the part that was used last

  const networks = data.networks.map(({ name }, i) => [i, name]);
  const network = choice("network", [["", "your own numbers"], ...networks], (i) => {
    if (i === "") return;
    const { n_layer, ratio } = data.networks[Number(i)];
    newNetwork({ network: i, layers: n_layer, ratio });
  });
  const layers = slider("layers L", { min: 2, max: 48 }, (n) =>
    newNetwork({ network: "", layers: n }),
  );
  const ratio = slider("a layer keeps r times its input", { min: 0.5, max: 32, step: 0.5 }, (r) => {
    Object.assign(state, { network: "", ratio: r });
    newGame();
    show();
  });
  const presets = jumps("Placements:", PRESETS, (lengthsFor) => {
    [state.lengths, state.keep] = lengthsFor(state.layers);
    show();
  });
  const keep = tick("the last segment is kept, so it is not computed again", (isOn) => {
    state.keep = isOn;
    show();
  });
  const boxes = make(
    "div",
    {
      class: "layers",
      role: "toolbar",
      "aria-label": "where segments begin",
      onkeydown: move,
    },
    make("span", { class: "layer" }, "1"),
  );
  const picture = chart("what is alive at each instant", { height: 280, right: 76 });
  const hatched = pattern(picture.svg, "var(--orange)", "//");
  const sentence = paragraph();
  const facts = table(["of this placement", "value"]);
  const verdict = paragraph();
  const instants = table(["instant", "layers", "inputs alive", "inside layers", "together"]);
  const folded = details("Every instant as a table", instants.element);
  folded.ontoggle = () => show();

  // Boxes of layers, and between them the buttons; only those that L changes are made or removed.
  function makeBoxes() {
    while (boxes.children.length > 2 * state.layers - 1) boxes.lastChild.remove();
    for (let i = (boxes.children.length + 1) / 2; i < state.layers; i += 1) {
      boxes.append(cutAfter(i), make("span", { class: "layer" }, String(i + 1)));
    }
    takeFocus(boxes.querySelector("button"));
  }

  function cutAfter(i) {
    const cut = button("", () => toggle(i));
    cut.className = "cut";
    cut.tabIndex = -1;
    cut.setAttribute("aria-label", `segment boundary between layers ${i} and ${i + 1}`);
    cut.onfocus = () => takeFocus(cut);
    return cut;
  }

  // The tab key leads to one of the buttons, arrow keys to the others.
  function takeFocus(cut) {
    const before = boxes.querySelector('button[tabindex="0"]');
    if (before) before.tabIndex = -1;
    cut.tabIndex = 0;
  }

  function move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const buttons = [...boxes.querySelectorAll("button")];
    const next = step && buttons[buttons.indexOf(event.target) + step];
    if (!next) return;
    event.preventDefault();
    next.focus();
  }

  function toggle(after) {
    const ends = new Set(endsOf(state.lengths));
    if (!ends.delete(after)) ends.add(after);
    state.lengths = lengthsOf([...ends].sort((a, b) => a - b));
    show();
  }

  function showBoxes() {
    const ends = endsOf(state.lengths);
    const lastStart = state.layers - state.lengths.at(-1);
    boxes.querySelectorAll(".layer").forEach((box, i) => {
      const kind = state.keep && i >= lastStart ? "kept" : "again";
      const first = i === 0 || ends.includes(i) ? "first" : "";
      box.className = `layer ${kind} ${first}`;
    });
    boxes.querySelectorAll("button").forEach((cut, i) => {
      const isCut = ends.includes(i + 1);
      cut.textContent = isCut ? "×" : "+";
      cut.setAttribute("aria-pressed", isCut);
    });
  }

  function showChart(now) {
    const n = now.instants.length;
    const every = Math.ceil(n / 18);
    const ticks = now.instants
      .map(({ segment }, i) => [i + 0.5, segment])
      .filter(([, segment], i) => segment && (n - 1 - i) % every === 0);
    const title = "end of forward, then backward from the last segment to the first";
    const top = Math.max(2.5 * game.goal, 1.1 * now.peak); // stands still, but for the worst
    picture.begin(
      { from: 0, to: n, ticks, title },
      {
        from: 0,
        to: top,
        ticks: [0, game.goal].map((inputs) => [inputs, short(inputs)]),
        title: "inputs",
      },
    );
    const span = (i) => [i + 0.04, i + 0.96];
    const below = now.instants.map(({ inputs }, i) => [span(i), [0, inputs]]);
    const above = now.instants.map(({ inputs, inside }, i) => [span(i), [inputs, inputs + inside]]);
    const nKept = state.keep ? 2 : 0; // the end of forward, and backward through the last segment
    picture.bars(below, { fill: "var(--sky)", ...EDGE });
    picture.bars(above.slice(0, nKept), { fill: "var(--orange)", ...EDGE });
    picture.bars(above.slice(nKept), { fill: hatched, ...EDGE });
    const look = { "stroke-width": 2, "stroke-dasharray": "6 4" };
    picture.rule({ y: game.goal }, { ...look, opacity: 0.5 });
    picture.text(n, game.goal, "reachable", { dx: 5 });
    picture.rule({ y: now.peak }, { stroke: "var(--vermilion)", ...look });
    picture.text(0, now.peak, `peak: ${short(now.peak)} inputs`, { dy: -6 });
  }

  function showInstants(now) {
    if (!folded.open) return;
    const ends = endsOf(state.lengths);
    instants.show(
      now.instants.map(({ segment, inputs, inside }) => {
        const end = ends[segment - 1];
        const span = segment ? `${end - state.lengths[segment - 1] + 1} to ${end}` : "all";
        const name = segment ? `segment ${segment}` : "end of forward";
        return [name, span, short(inputs), short(inside), short(inputs + inside)];
      }),
    );
  }

  function show() {
    const now = cost(state.lengths, state.ratio, state.keep);
    const share = now.runsAgain / state.layers;
    network.show(state.network);
    layers.show(state.layers, `${state.layers} layers`);
    ratio.show(state.ratio, `${short(state.ratio)} times`);
    keep.show(state.keep);
    presets.show((lengthsFor) => {
      const [lengths, isKept] = lengthsFor(state.layers);
      return isKept === state.keep && String(lengths) === String(state.lengths);
    });
    showBoxes();
    showChart(now);
    showInstants(now);
    facts.show([
      ["layers in the segments", written(state.lengths)],
      ["alive at the end of the forward pass", `${short(now.forward)} inputs`],
      ["peak", `${short(now.peak)} inputs`],
      ["peak without checkpoints", `${short(1 + state.ratio * state.layers)} inputs`],
      ["peak if no input were freed", `${short(now.rule)} inputs`],
      ["computed again", `${now.runsAgain} of ${state.layers} layers`],
      ["extra forward work", percent(share)],
      ["extra work in a step", percent(share / 3)],
    ]);
    const isLastKept = state.keep && now.at === state.lengths.length;
    const moment = now.at
      ? `while backward goes through segment ${now.at}, which ` +
        (isLastKept ? "was kept" : "is computed again")
      : "at the end of the forward pass";
    last = sentence.textContent = `The peak is ${short(now.peak)} inputs. It comes ${moment}.`;
  }

  function newGame() {
    Object.assign(game, { tries: 0, best: Infinity, goal: best(state.layers, state.ratio) });
    verdict.textContent =
      "The exercise: find the smallest peak. " +
      `Some placement reaches ${short(game.goal)} inputs.`;
  }

  function tryPlacement() {
    const { peak } = cost(state.lengths, state.ratio, state.keep);
    game.tries += 1;
    game.best = Math.min(game.best, peak);
    const result =
      peak === game.goal
        ? `You found the smallest peak in try ${game.tries}.`
        : `Your best so far is ${percent(game.best / game.goal - 1)} above it.`;
    last =
      verdict.textContent = `Try ${game.tries}: ${short(peak)} inputs. Best reachable: ${short(game.goal)}. ${result}`;
  }

  function newNetwork(changes) {
    Object.assign(state, changes);
    state.lengths = equal(state.layers, state.layers);
    state.keep = false;
    makeBoxes();
    newGame();
    show();
  }

  layout(root, data.say, {
    controls: [
      paragraph(network.element, layers.element, ratio.element),
      presets.element,
      paragraph(keep.element),
      paragraph("Press + to begin a new segment there, × to join two."),
      boxes,
    ],
    picture: [
      picture.svg,
      paragraph(
        "Blue: the input of a segment, always kept. Hatched: computed again. Plain yellow: kept.",
      ),
      sentence,
    ],
    numbers: [facts.element, verdict, paragraph(button("Try this placement", tryPlacement))],
  });
  root.append(folded);
  newNetwork({});
  return () => last;
}
