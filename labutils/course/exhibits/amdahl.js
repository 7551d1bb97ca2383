// Only matmuls get faster: how fast is the whole step?
import {
  chart,
  DIAMOND,
  jumps,
  layout,
  paragraph,
  percent,
  short,
  slider,
  table,
} from "./shared.js";

// Amdahl's law: a share of a whole becomes `speedup` times as fast, and the rest stays.
export function amdahl(share, speedup) {
  return 1 / (1 - share + share / speedup);
}

const times = (x) => (Number.isFinite(x) ? `${short(x, 3)}×` : "any number ×");

function whyNot(ratio) {
  if (Math.abs(ratio - 1) < 0.02) return "The two agree within 2 %.";
  return `So the rest of the step became ${ratio > 1 ? "faster, too" : "slower"}.`;
}

export function mount(root, data) {
  const cards = data.cards.map((card) => ({ ...card, name: `${card.card}, ${card.precision}` }));
  const { share: ownShare, speedup } = data.start;
  const own = { share: ownShare, product: speedup, name: "yours" };
  const points = ownShare === null ? cards : [...cards, own];
  const { share: startShare, product: startProduct } = points.at(-1);
  const state = { share: startShare, product: startProduct };
  const low = Math.min(-2, Math.floor(Math.log2(startProduct))); // yours may be slow
  const set = (changes) => {
    Object.assign(state, changes);
    show();
  };

  const share = slider("share of matmuls in the step", { min: 0, max: 100, step: 0.5 }, (x) =>
    set({ share: x / 100 }),
  );
  const speed = slider("speed of one matmul", { min: low, max: 6, step: 0.05 }, (x) =>
    set({ product: 2 ** x }),
  );
  const places = points.map((point) => [point.card ?? point.name, point]);
  const marks = jumps("Jump to", places, (point) =>
    set({ share: point.share, product: point.product }),
  );
  const sentence = paragraph();
  const compared = paragraph();
  const picture = chart("speed of the step over the speed of one matmul", { height: 300 });
  const rows = table(["point", "share", "matmul", "law", "ledger"]);
  rows.show(
    points.map(({ name, share, product, step }) => [
      name,
      percent(share),
      times(product),
      times(amdahl(share, product)),
      step ? times(step) : "–",
    ]),
  );
  const isHere = (point) => point.share === state.share && point.product === state.product;

  function showChart() {
    const lowest = Math.min(...points.map((at) => Math.log2(amdahl(at.share, at.product))));
    const x = { from: low, to: 6 };
    const y = { from: Math.min(-2, Math.floor(lowest)), to: 6 };
    const asTick = (e) => [e, e < 0 ? `1/${2 ** -e}` : `${2 ** e}`];
    const isShown = (up) => up >= y.from && up <= y.to;
    const powers = Array.from({ length: 13 }, (_, i) => i - 6);
    const [some, all] = [powers.filter((e) => e % 2 === 0 && e > low), powers.filter(isShown)];
    picture.begin(
      { ...x, ticks: some.map(asTick), title: "speed of one matmul, ×" },
      { ...y, ticks: all.map(asTick), title: "speed of the step, ×" },
    );
    const curve = [];
    for (let e = x.from; e <= x.to; e += 0.1)
      curve.push([e, Math.log2(amdahl(state.share, 2 ** e))]);
    picture.line(
      curve.filter(([, up]) => isShown(up)),
      { stroke: "var(--blue)", "stroke-width": 3 },
    );
    const limit = amdahl(state.share, Infinity);
    if (isShown(Math.log2(limit))) {
      picture.rule({ y: Math.log2(limit) }, { "stroke-dasharray": "5 4" });
      picture.text(x.from, Math.log2(limit), `limit ${times(limit)}`, { dx: 6, dy: -5 });
    }
    const up = Math.log2(amdahl(state.share, state.product));
    const look = { fill: "none", stroke: "var(--vermilion)", "stroke-width": 3 };
    if (isShown(up)) picture.mark(Math.log2(state.product), up, DIAMOND, look);
    // No curve comes below 1 where a matmul is faster: names stand there, in three rows.
    for (const [i, point] of points.filter(({ step }) => step).entries()) {
      const at = [Math.log2(point.product), Math.log2(point.step)];
      const below = [at[0], -0.35 - 0.5 * (i % 3)];
      picture.line([at, below], { stroke: "var(--line)" });
      picture.dot(...at, { fill: "var(--sky)", opacity: isHere(point) ? 1 : 0.6 });
      picture.text(...below, point.card, { anchor: "middle", dy: 12 });
    }
  }

  function show() {
    const step = amdahl(state.share, state.product);
    const limit = amdahl(state.share, Infinity);
    share.show(100 * state.share, percent(state.share));
    speed.show(Math.log2(state.product), times(state.product));
    marks.show(isHere);
    const most =
      state.share === 1
        ? "There is no limit: the step is matmuls and nothing else."
        : `If matmuls took no time, the step would be ${times(limit)} as fast: the limit.`;
    sentence.textContent =
      `Matmuls are ${percent(state.share)} of the step, and one matmul is ` +
      `${times(state.product)} as fast. The step is ${times(step)} as fast. ${most}`;
    const here = points.find((point) => isHere(point) && point.step);
    compared.textContent = here
      ? `${here.name}: Amdahl's law says ${times(step)}. The time ledger predicts ` +
        `${times(here.step)}. ${whyNot(here.step / step)}`
      : "";
    showChart();
  }

  layout(root, data.say, {
    controls: [paragraph(share.element, speed.element), marks.element],
    picture: [
      picture.svg,
      paragraph(
        "Diamond: where the sliders stand. Pale: a card with another share, so on another curve.",
      ),
    ],
    numbers: [sentence, compared, rows.element],
    folded: [
      ["Where?", "At 1 / (1 − share): all that is no matmul takes as long as before."],
      [
        "How we know",
        "The cards are predicted: GPT-2 124M in 16 bits against FP32. The law lets only matmuls " +
          "change; the time ledger looks at each operation.",
      ],
    ],
  });
  show();
  return () => `${sentence.textContent} ${compared.textContent}`;
}
