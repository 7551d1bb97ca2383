// One training step in slow motion: which tensors are alive, in which dtype, and why?
import {
  button,
  chart,
  CURSOR,
  choice,
  jumps,
  layout,
  make,
  MIB,
  paragraph,
  pattern,
  player,
  slider,
  stack,
  sum,
  swatch,
  table,
} from "./shared.js";

const COPIES = "cast weights";
const NAMES = { [COPIES]: "16-bit copies of weights", "optimizer state": "moments of AdamW" };
// Parts of GPT-2, and other marks of a trace, in words.
const PARTS = {
  wte: "token embedding",
  wpe: "position embedding",
  ln_1: "first layer norm",
  "attn.c_attn": "query, key, value",
  "attn.c_proj": "output of attention",
  ln_2: "second layer norm",
  "mlp.c_fc": "first layer of the MLP",
  "mlp.act": "activation function",
  "mlp.c_proj": "second layer of the MLP",
  ln_f: "last layer norm",
  lm_head: "logits",
};
const MARKS = {
  "": "before the step",
  peak: "the most bytes of this phase",
  clip: "the gradients are clipped",
  step: "the weights are updated",
};
const ENDS = {
  forward: "the forward pass is over",
  loss: "the loss is known",
  backward: "all gradients are complete",
  optimizer: "the gradients are freed",
};
const SEEN = 0.005 * MIB; // fewer bytes would be shown as 0.00
const mib = (bytes) => (bytes / MIB).toFixed(2);

// What a mark is in words, such as "transformer.h.0.ln_1.weight" in the backward pass.
export function wordsFor(phase, name) {
  if (name === "end") return ENDS[phase];
  if (name in MARKS) return MARKS[name];
  const path = /^(?:transformer\.)?(?:h\.(\d+)\.)?(.+?)(\.weight)?$/;
  const [, block, part, weight] = name.match(path);
  const words = block ? `block ${Number(block) + 1}, ${PARTS[part]}` : PARTS[part];
  return weight ? `the gradient of a weight: ${words}` : words;
}

// The moments of a run, [line of the loop, words, made, changes]. A GradScaler cannot run in a
// trace. It divides in place, and changes one number: the bytes stay.
export function momentsOf(run) {
  const moments = [];
  let line = "clip";
  for (const [phase, name, made, changes] of run.moments) {
    const isUpdate = phase === "optimizer";
    if (isUpdate && run.scaler && moments.at(-1)[0] === "backward") {
      moments.push(["unscale", "the gradients are divided by the scale", "", []]);
    }
    if (isUpdate && name === "end") line = "clear";
    moments.push([isUpdate ? line : phase, wordsFor(phase, name), made, changes]);
    if (name === "clip") line = "step";
    if (name === "step" && run.scaler) {
      moments.push(["update", "the scaler chooses the next scale", "", []]);
    }
  }
  return moments;
}

// The bytes of each group at each moment of a run: the sums of its changes, [group, bytes, …].
export function alive(run) {
  const now = run.groups.map(() => 0);
  return run.moments.map(([, , , changes]) => {
    for (let i = 0; i < changes.length; i += 2) now[changes[i]] += changes[i + 1];
    return [...now];
  });
}

export function highest(book) {
  const totals = book.map(sum);
  return totals.indexOf(Math.max(...totals));
}

// Where copies of weights first are, where the last is gone, and how many bytes they have at most.
export function copiesOf(run) {
  const ofCopies = (now) => sum(now.filter((_, g) => run.groups[g][0] === COPIES));
  const bytes = alive(run).map(ofCopies);
  const largest = Math.max(...bytes);
  if (largest === 0) return null;
  const first = bytes.findIndex((n) => n > 0);
  return { first, gone: bytes.findLastIndex((n) => n > 0) + 1, largest };
}

// The lines of a training loop, [phase, text].
function codeOf({ autocast, scaler }) {
  const indent = autocast ? "    " : "";
  const lines = [
    ["forward", `${indent}logits = model(input_ids).logits`],
    ["loss", `${indent}loss = cross_entropy(logits.float(), targets)`],
    ["backward", scaler ? "scaler.scale(loss).backward()" : "loss.backward()"],
    ["clip", "clip_grad_norm_(model.parameters(), max_norm)"],
    ["step", scaler ? "scaler.step(optimizer)" : "optimizer.step()"],
    ["clear", "optimizer.zero_grad()"],
  ];
  if (scaler) {
    lines.splice(3, 0, ["unscale", "scaler.unscale_(optimizer)"]);
    lines.splice(6, 0, ["update", "scaler.update()"]);
  }
  const region = `with torch.autocast(device_type, dtype=torch.${autocast}):`;
  return autocast ? [["", region], ...lines] : lines;
}

function reasonFor(phase, { autocast, scaler }) {
  const scaled = " The loss was multiplied by the scale S, so all gradients are S times too large.";
  const skips = " If a gradient is inf or NaN, the scaler skips this.";
  const reasons = {
    forward: autocast
      ? `Autocast gives each matrix product ${autocast} copies of its inputs. Most of them stay, ` +
        "because backward needs them."
      : "Each part keeps what backward needs.",
    loss: autocast
      ? `The logits are ${autocast}, and the loss uses a float32 copy. When autocast's region ` +
        "ends, copies that backward does not need are freed."
      : "The loss is computed from the logits.",
    backward:
      "The gradient of a weight is stored in float32. What backward has used is freed." +
      (scaler ? scaled : ""),
    unscale:
      "unscale_ divides the gradients by S, in place. It stands before clipping, because the " +
      "limit is for true gradients.",
    clip: "Clipping makes the gradients smaller, in place, if their norm is above the limit.",
    step: "AdamW changes the float32 weights. Nothing is copied back." + (scaler ? skips : ""),
    update: "The scaler halves S after inf or NaN. After many steps without them it doubles S.",
    clear: "The gradients are freed. Weights and moments stay for the next step.",
  };
  return reasons[phase];
}

export function mount(root, data) {
  const runs = {};
  for (const [name, run] of Object.entries(data.runs)) {
    runs[name] = { ...run, moments: momentsOf(run) };
  }
  const books = {};
  for (const [name, run] of Object.entries(runs)) books[name] = alive(run);
  const most = Math.max(...Object.values(books).flat().map(sum));
  const is16 = ([, dtype]) => dtype.endsWith("float16");
  const hatchOf = (group) => (is16(group) ? "//" : "");
  const nameOf = ([category]) => NAMES[category] ?? category;
  const colourOf = ([category]) => data.looks.find(([name]) => name === category)[1];
  const { precision: first } = data.start;
  const state = { name: first, moment: highest(books[first]) };
  const go = (moment) => {
    state.moment = Math.max(0, Math.min(moment, books[state.name].length - 1));
    show();
  };
  const precision = choice(
    "precision",
    Object.keys(runs).map((name) => [name, name]),
    (name) => {
      state.name = name;
      showRun();
      go(state.moment);
    },
  );
  const back = button("◀ back", () => go(state.moment - 1));
  const next = button("next ▶", () => go(state.moment + 1));
  const isAtEnd = () => state.moment === books[state.name].length - 1;
  const play = player((isFirst) => go(isFirst ? 0 : state.moment + 1), isAtEnd);
  const moment = slider("moment", { min: 0 }, (position) => {
    play.stop();
    go(position);
  });
  const places = make("div");
  const code = make("pre", { tabindex: 0, role: "group", "aria-label": "the training loop" });
  const sentence = paragraph();
  const reason = paragraph();
  const fills = {};
  const course = chart("bytes alive over the step", { height: 250, left: 40, bottom: 26 });
  course.drag((at) => {
    play.stop();
    go(Math.floor(at));
  });
  const rows = table(["tensors", "dtype", "MiB now", "change"]);
  const swatches = {};
  for (const group of Object.values(runs).flatMap((run) => run.groups)) {
    fills[group] ??= pattern(course.svg, colourOf(group), hatchOf(group));
    swatches[group] ??= swatch(colourOf(group), hatchOf(group));
  }
  let seen = []; // which groups of the run have bytes to show
  let titles = []; // their names in the table
  const copiesText = paragraph();

  // Groups that have bytes to show: [group, bytes now, bytes more than a moment before].
  function shown() {
    const book = books[state.name];
    const [now, before] = [book[state.moment], book[Math.max(state.moment - 1, 0)]];
    return seen.map((g) => [runs[state.name].groups[g], now[g], now[g] - before[g]]);
  }

  let codeOfPhase = null;
  function showCode(phase) {
    if (phase === codeOfPhase) return;
    codeOfPhase = phase;
    const lines = codeOf(runs[state.name]).map(([its, text]) => {
      const isNow = its === phase;
      const line = `${isNow ? "▶ " : "  "}${text.padEnd(54)}\n`; // as wide in each precision
      return isNow ? make("strong", { "aria-current": "step" }, line) : line;
    });
    code.replaceChildren(...lines);
  }

  function showSentence([, text, made]) {
    const list = (sign) =>
      shown()
        .filter(([, , change]) => sign * change >= SEEN)
        .map(([group, , change]) => `${nameOf(group)} (${group[1]}) ${mib(Math.abs(change))} MiB`);
    const [more, less] = [list(1), list(-1)];
    const result = made ? `, in ${made}` : "";
    const total = mib(sum(books[state.name][state.moment]));
    const parts = [`${text[0].toUpperCase()}${text.slice(1)}${result}: ${total} MiB are alive.`];
    if (more.length) parts.push(`More: ${more.join(", ")}.`);
    if (less.length) parts.push(`Less: ${less.join(", ")}.`);
    sentence.textContent = parts.join(" ");
  }

  function showCourse() {
    const book = books[state.name];
    const phases = runs[state.name].moments.map(([phase]) => phase);
    const ticks = ["forward", "loss", "backward", "step"].map((phase) => {
      return [(phases.indexOf(phase) + phases.lastIndexOf(phase)) / 2, phase];
    });
    const levels = [0, Math.max(...book.map(sum))].map((bytes) => [bytes, Math.round(bytes / MIB)]);
    course.begin(
      { from: 0, to: book.length, ticks },
      { from: 0, to: most, ticks: levels, title: "MiB" },
    );
    const { groups } = runs[state.name];
    const shares = book.map((bytes) => seen.map((g) => bytes[g]));
    const looks = seen.map((g) => fills[groups[g]]);
    stack(course, shares, looks);
    for (const phase of ["loss", "backward", "optimizer"]) {
      const begins = runs[state.name].moments.findIndex(([line]) => line === phase);
      if (begins > 0) course.rule({ x: begins }, { opacity: 0.3 });
    }
  }

  function showRows() {
    const cells = shown().map(([group, bytes, change], i) => {
      const sign = change > 0 ? "+" : "−";
      const text = Math.abs(change) < SEEN ? "" : `${sign}${mib(Math.abs(change))}`;
      return [titles[i], group[1], mib(bytes), text];
    });
    const all = ["all", "", mib(sum(books[state.name][state.moment])), ""];
    rows.show([...cells, all], (i) => i < cells.length && cells[i][3] !== "");
  }

  // What changes with the precision only.
  function showRun() {
    const book = books[state.name];
    const phases = runs[state.name].moments.map(([phase]) => phase);
    const copies = copiesOf(runs[state.name]);
    const spots = [
      ["the peak", highest(book)],
      ["clip", phases.indexOf("clip")],
    ];
    if (runs[state.name].scaler) spots.push(["unscale", phases.indexOf("unscale")]);
    if (copies) spots.push(["first 16-bit copy", copies.first], ["last copy is gone", copies.gone]);
    spots.sort(([, a], [, b]) => a - b);
    const { groups } = runs[state.name];
    seen = [...groups.keys()].filter((g) => book.some((bytes) => bytes[g] >= SEEN));
    titles = seen.map((g) => make("span", {}, swatches[groups[g]], nameOf(groups[g])));
    showCode("");
    showCourse();
    places.replaceChildren(jumps("Jump to", spots, go).element);
    moment.limit(book.length - 1);
    copiesText.textContent = copies
      ? `The 16-bit copies of weights have at most ${mib(copies.largest)} MiB. They exist from ` +
        `moment ${copies.first + 1} to ${copies.gone}. In the picture, tensors of 16 bits are hatched.`
      : "Without autocast there are no 16-bit copies.";
  }

  function show() {
    const run = runs[state.name];
    const now = run.moments[state.moment];
    precision.show(state.name);
    moment.show(state.moment, `${state.moment + 1} of ${run.moments.length}`);
    back.disabled = state.moment === 0;
    next.disabled = state.moment === run.moments.length - 1;
    showCode(now[0]);
    showSentence(now);
    reason.textContent = reasonFor(now[0], run);
    course.point(state.moment + 0.5, CURSOR);
    showRows();
  }

  layout(root, data.say, {
    controls: [
      paragraph(precision.element, play.element, " ", back, " ", next),
      paragraph(moment.element),
      places,
    ],
    picture: [course.svg, make("div", { class: "steady" }, reason, sentence)],
    numbers: [code, rows.element, copiesText],
    folded: [
      [
        "How we know",
        "Predicted for the small GPT-2 on a CPU, in a step after the first one: AdamW has its " +
          "moments already.",
      ],
    ],
  });
  showRun();
  show();
  return () => sentence.textContent;
}
