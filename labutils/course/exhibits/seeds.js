// Recorded runs of several precisions over seeds: do two of them differ?
import { chart, choice, layout, paragraph, short, slider, sum, table } from "./shared.js";

export const CANNOT_TELL = "cannot tell here";
export const mean = (numbers) => sum(numbers) / numbers.length;

// The standard deviation between the numbers of a sample; NaN for fewer than two.
export function sigma(numbers) {
  const middle = mean(numbers);
  return Math.sqrt(sum(numbers.map((x) => (x - middle) ** 2)) / (numbers.length - 1));
}

// The mean of paired differences and its 95 % interval; pairs that are not finite are left out.
export function difference(base, other, t) {
  const pairs = other.map((x, i) => x - base[i]).filter(Number.isFinite);
  const n = pairs.length;
  if (n < 2) return { mean: n ? pairs[0] : NaN, low: NaN, high: NaN, n, pairs };
  const half = (t[Math.min(n - 2, t.length - 1)] * sigma(pairs)) / Math.sqrt(n);
  return { mean: mean(pairs), low: mean(pairs) - half, high: mean(pairs) + half, n, pairs };
}

export function verdict({ low, high }, worthTelling) {
  if (low > -worthTelling && high < worthTelling) return "too small to matter";
  if (low > 0) return "larger";
  return high < 0 ? "smaller" : CANNOT_TELL;
}

export function mount(root, data) {
  const { steps, rates } = data;
  const start = { rate: rates[0][0], other: "pure_bf16", base: "fp32" };
  const n = data.loss[`${start.rate} ${start.base}`].length;
  const state = { ...start, n, step: steps.length - 1 };
  const set = (changes) => {
    Object.assign(state, changes);
    show();
  };
  const arms = Object.entries(data.arms);
  const named = rates.map(([name, value]) => [name, `${name}: ${value}`]);
  const rateChoice = choice("learning rate", named, (rate) => set({ rate }));
  const otherChoice = choice("compare", arms, (other) => set({ other }));
  const baseChoice = choice("with", arms, (base) => set({ base }));
  const seeds = slider("seeds", { min: 2, max: n }, (n) => set({ n }));
  const step = slider("step", { min: 0, max: steps.length - 1 }, (step) => set({ step }));
  const sentence = paragraph();
  const picture = chart("the interval of the mean difference, by the number of seeds", {
    height: 300,
  });
  const rows = table(["precision", "loss ± σ", "skipped", "inf or NaN"]);

  // The numbers of the first seeds at this step; where a record has no runs they are 0.
  const at = (record, arm, n = state.n, step = state.step) => {
    const runs = record[`${state.rate} ${arm}`]?.slice(0, n) ?? [];
    return runs.length ? runs.map((run) => run[step]) : [0];
  };

  const gapOf = (n, step) =>
    difference(at(data.loss, state.base, n, step), at(data.loss, state.other, n, step), data.t);

  function rowOf([arm, words]) {
    const losses = at(data.loss, arm);
    const finite = losses.filter(Number.isFinite);
    const spread = finite.length > 1 ? `\u00a0±\u00a0${short(sigma(finite), 2)}` : "";
    const loss = finite.length ? `${short(mean(finite), 5)}${spread}` : "none is finite";
    const skipped = short(mean(at(data.skipped, arm)), 3);
    return [words, loss, skipped, `${losses.length - finite.length} of ${losses.length}`];
  }

  function showChart(gap) {
    const counts = Array.from({ length: n - 1 }, (_, i) => i + 2);
    const [gaps, last] = [state.step, steps.length - 1].map((step) =>
      counts.map((seeds) => ({ seeds, ...gapOf(seeds, step) })).filter((one) => one.n > 1),
    );
    // one scale, now and at the end. Two seeds say so little that their interval may be cut
    const wanted = [...gaps, ...last].flatMap(({ low, high, n, pairs }) =>
      n > 2 ? [...pairs, low, high] : pairs,
    );
    const largest = Math.max(0, ...wanted.map(Math.abs)) || 1;
    const unit = 10 ** Math.floor(Math.log10(largest));
    const reach = unit * [1, 2, 5, 10].find((times) => times * unit >= largest);
    const across = [-reach, -reach / 2, 0, reach / 2, reach].map((x) => [x, short(x, 2)]);
    const title = "difference, nats. Circles: pairs; boxes: 95 %. Clear of 0: told apart";
    const up = { from: n + 0.7, to: 0.2, ticks: counts.map((n) => [n, n]), title: "seeds" };
    picture.begin({ from: -1.05 * reach, to: 1.05 * reach, ticks: across, title }, up);
    if (!gaps.length) picture.text(-reach, n / 2 + 0.5, "no two finite pairs", { dy: 0 });
    picture.rule({ x: 0 }, { "stroke-dasharray": "3 3" });
    for (const { seeds, ...one } of gaps) {
      const [isHere, row] = [seeds === state.n, [seeds - 0.3, seeds + 0.3]];
      const look = { fill: "var(--sky)", stroke: "currentColor", opacity: isHere ? 1 : 0.35 };
      const cut = [one.low, one.high].map((end) => Math.min(reach, Math.max(-reach, end)));
      picture.bar(cut, row, look);
      if (one.high > reach) picture.text(reach, seeds, "→", { dx: 3 });
      if (one.low < -reach) picture.text(-reach, seeds, "←", { dx: 2 });
      const middle = row.map((at) => [one.mean, at]);
      picture.line(middle, { "stroke-width": isHere ? 3 : 1.5 });
    }
    const circle = { fill: "none", stroke: "var(--vermilion)", "stroke-width": 2 };
    gap.pairs.forEach((pair) => picture.dot(pair, 1, circle));
  }

  function show() {
    rateChoice.show(state.rate);
    otherChoice.show(state.other);
    baseChoice.show(state.base);
    seeds.show(state.n, `${state.n} seeds`);
    step.show(state.step, `after ${steps[state.step]} steps`);
    const gap = gapOf(state.n);
    const names = `${data.arms[state.other]} minus ${data.arms[state.base]}`;
    const numbers =
      gap.n < 2
        ? `${CANNOT_TELL}. ${gap.n ? "Only one" : "None"} of ${state.n} pairs has finite losses`
        : `${short(gap.mean, 3)}, 95 % interval ${short(gap.low, 3)} to ${short(gap.high, 3)}, ` +
          `${gap.n} pairs: ${verdict(gap, data.worth_telling)}`;
    sentence.textContent = `${names}: ${numbers}.`;
    showChart(gap);
    rows.show(arms.map(rowOf));
  }

  layout(root, data.say, {
    controls: [
      paragraph(rateChoice.element, otherChoice.element, baseChoice.element),
      paragraph(seeds.element, step.element),
    ],
    picture: [picture.svg, sentence],
    numbers: [rows.element],
    folded: [
      [
        "How we know",
        `Too small to matter: the whole interval lies within ± ${data.worth_telling}. Else larger or ` +
          `smaller, if it leaves out 0. Recorded on ${data.made}. A loss is the ` +
          `mean over the last ${steps[0]} steps, σ the standard deviation between seeds. ` +
          "Skipped: steps that the scaler left out, the mean of the seeds. One scale for all steps.",
      ],
    ],
  });
  show();
  return () => sentence.textContent;
}
