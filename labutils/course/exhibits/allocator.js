// Request and free tensors: which segments does PyTorch's caching allocator ask for, and which
// holes stay?
import {
  button,
  chart,
  layout,
  make,
  MIB,
  paragraph,
  short,
  slider,
  sum,
  table,
  tick,
} from "./shared.js";

// In bytes, from PyTorch's c10/core/AllocatorConfig.h; a test compares them with those of Python.
export const RULES = {
  smallest_block: 512,
  small_request: MIB,
  small_segment: 2 * MIB,
  large_segment: 20 * MIB,
  large_request: 10 * MIB,
  round_large: 2 * MIB,
  addresses: 20 * MIB * 2 ** 24, // that an expandable segment can grow into: they cost nothing
};
const EMPTY_CACHE = "empty_cache()";
const up = (n, multiple) => Math.ceil(n / multiple) * multiple;

// As labutils.prediction.allocator.CachingAllocator with torch's defaults, or expandable segments.
export class Allocator {
  constructor(limit, expandable) {
    Object.assign(this, { limit, expandable });
    Object.assign(this, { allocated: 0, reserved: 0, retries: 0, nextAddress: 0 });
    this.small = { segment: RULES.small_segment, free: [], unmapped: [] };
    this.large = { segment: RULES.large_segment, free: [], unmapped: [] };
    this.blocks = new Set();
  }

  // A block, or null where the driver has no more. `how` says where it came from.
  allocate(bytes) {
    const { smallest_block, small_request } = RULES;
    const size = Math.max(smallest_block, up(bytes, smallest_block));
    const pool = size <= small_request ? this.small : this.large;
    const [before, retries] = [this.reserved, this.retries];
    let block = this.find(pool, size);
    const hole = block ? block.size : 0;
    block = block || this.askDriver(pool, size);
    this.how = { size, hole, grown: this.reserved - before, retried: this.retries > retries };
    if (!block) return null;
    const rest = block.size - size;
    const isWorthIt =
      pool === this.small || this.expandable ? rest >= smallest_block : rest > small_request;
    if (isWorthIt) this.insert(this.split(block, size, true));
    block.used = true;
    this.allocated += block.size;
    return block;
  }

  free(block) {
    this.allocated -= block.size;
    block.used = false;
    this.mergeFree(block);
    this.insert(block);
  }

  emptyCache() {
    for (const pool of [this.small, this.large]) {
      for (const block of [...pool.free]) {
        if (this.expandable) this.unmap(block);
        else if (!block.previous && !block.next) {
          this.remove(block);
          this.blocks.delete(block);
          this.reserved -= block.size;
        }
      }
    }
  }

  // The smallest free block that is large enough, taken from its pool.
  find(pool, size) {
    let at = pool.free.findIndex((block) => block.size >= size);
    if (at < 0) return null;
    const couldGrow = (block) =>
      block.size + (block.next && !block.next.mapped ? block.next.size : 0);
    while (
      this.expandable &&
      at + 1 < pool.free.length &&
      couldGrow(pool.free[at + 1]) < couldGrow(pool.free[at])
    )
      at += 1;
    return pool.free.splice(at, 1)[0];
  }

  askDriver(pool, size) {
    const ask = () =>
      this.expandable ? this.grow(pool, size) : this.newSegment(pool, this.segmentFor(size));
    let block = ask();
    if (!block) {
      this.retries += 1;
      this.emptyCache();
      block = ask();
    }
    return block;
  }

  segmentFor(size) {
    const { small_request, small_segment, large_request, large_segment, round_large } = RULES;
    if (size <= small_request) return small_segment;
    return size < large_request ? large_segment : up(size, round_large);
  }

  newSegment(pool, segment) {
    if (!this.reserve(segment)) return null;
    const block = this.make(this.nextAddress, segment, pool, true);
    this.nextAddress += segment;
    return block;
  }

  reserve(bytes) {
    if (this.reserved + bytes > this.limit) return false;
    this.reserved += bytes;
    return true;
  }

  make(address, size, pool, mapped, previous = null, next = null) {
    const block = { address, size, pool, mapped, previous, next, used: false };
    this.blocks.add(block);
    return block;
  }

  insert(block) {
    const list = block.pool.free;
    const at = list.findIndex(
      (other) =>
        other.size > block.size || (other.size === block.size && other.address > block.address),
    );
    list.splice(at < 0 ? list.length : at, 0, block);
  }

  remove(block) {
    block.pool.free.splice(block.pool.free.indexOf(block), 1);
  }

  insertUnmapped(block) {
    block.pool.unmapped.push(block);
    block.pool.unmapped.sort((a, b) => a.address - b.address);
  }

  removeUnmapped(block) {
    block.pool.unmapped.splice(block.pool.unmapped.indexOf(block), 1);
  }

  // Cut a block to a size; what remains is returned.
  split(block, size, mapped) {
    const rest = this.make(
      block.address + size,
      block.size - size,
      block.pool,
      mapped,
      block,
      block.next,
    );
    if (block.next) block.next.previous = rest;
    [block.next, block.size] = [rest, size];
    return rest;
  }

  merge(block, neighbour) {
    if (neighbour === block.previous) {
      block.address = neighbour.address;
      block.previous = neighbour.previous;
      if (block.previous) block.previous.next = block;
    } else {
      block.next = neighbour.next;
      if (block.next) block.next.previous = block;
    }
    block.size += neighbour.size;
    this.blocks.delete(neighbour);
  }

  mergeFree(block) {
    for (const neighbour of [block.previous, block.next]) {
      if (neighbour && !neighbour.used && neighbour.mapped) {
        this.remove(neighbour);
        this.merge(block, neighbour);
      }
    }
  }

  // Put memory behind more addresses of the expandable segment.
  grow(pool, size) {
    let block = null;
    for (const unmapped of pool.unmapped) {
      block = this.withRoom(unmapped, size);
      if (block) break;
    }
    if (!block) {
      block = this.make(this.nextAddress, RULES.addresses, pool, false);
      this.nextAddress += RULES.addresses;
      this.insertUnmapped(block);
    }
    if (!block.mapped) block = this.map(block, size);
    while (block && block.size < size) block = this.map(block.next, size - block.size);
    if (block) this.remove(block);
    return block;
  }

  withRoom(unmapped, size) {
    const before = unmapped.previous;
    const first = before && !before.used ? before : unmapped;
    let room = 0;
    for (let block = first; block && !block.used && room < size; block = block.next)
      room += block.size;
    return room >= size ? first : null;
  }

  map(block, wanted) {
    const size = Math.min(block.size, up(wanted, block.pool.segment));
    if (!this.reserve(size)) return null;
    this.removeUnmapped(block);
    if (block.size > size) this.insertUnmapped(this.split(block, size, false));
    block.mapped = true;
    this.mergeFree(block);
    this.insert(block);
    return block;
  }

  // Take the memory from behind the whole pieces that lie in a free block.
  unmap(block) {
    const { pool, address } = block;
    const begin = up(address, pool.segment);
    const stop = address + block.size;
    const end = Math.floor(stop / pool.segment) * pool.segment;
    if (end <= begin) return;
    this.remove(block);
    this.reserved -= end - begin;
    if (begin > address) {
      const front = this.make(address, begin - address, pool, true, block.previous, block);
      if (block.previous) block.previous.next = front;
      block.previous = front;
      this.insert(front);
    }
    if (end < stop) {
      const back = this.make(end, stop - end, pool, true, block, block.next);
      if (block.next) block.next.previous = back;
      block.next = back;
      this.insert(back);
    }
    [block.address, block.size, block.mapped] = [begin, end - begin, false];
    for (const neighbour of [block.previous, block.next]) {
      if (neighbour && !neighbour.mapped) {
        this.removeUnmapped(neighbour);
        this.merge(block, neighbour);
      }
    }
    this.insertUnmapped(block);
  }
}

// What a list of events leaves. An event is {new: [[number, bytes], …]}, {free: [numbers]} or
// {empty: true}, with words.
export function replay(events, limit, expandable) {
  const cache = new Allocator(limit, expandable);
  const tensors = new Map();
  const after = events.map((event) => {
    let failed = null;
    for (const number of event.free ?? []) {
      if (tensors.has(number)) cache.free(tensors.get(number));
      tensors.delete(number);
    }
    for (const [number, bytes] of event.new ?? []) {
      const block = cache.allocate(bytes);
      if (block) tensors.set(number, Object.assign(block, { number }));
      else failed = cache.how;
    }
    const before = cache.reserved;
    if (event.empty) cache.emptyCache();
    const { allocated, reserved, how } = cache;
    return { allocated, reserved, failed, how, returned: before - reserved };
  });
  return { cache, tensors, after };
}

const largestHole = ({ small, large }) =>
  Math.max(0, ...[...small.free, ...large.free].map(({ size }) => size));
const mib = (bytes) => short(bytes / MIB);
const LARGEST_REQUEST = 300; // MiB

// Blocks in the order of their addresses, a list for each segment.
function segmentsOf(cache) {
  const mapped = [...cache.blocks].filter((block) => block.mapped);
  const segments = [];
  for (const block of mapped.sort((a, b) => a.address - b.address)) {
    if (segments.at(-1)?.at(-1).next === block) segments.at(-1).push(block);
    else segments.push([block]);
  }
  return segments;
}

// What happened in an event, in words.
function happened(event, { failed, how, returned }, cache) {
  if (failed) {
    return [
      `Out of memory: ${mib(failed.size)} MiB were asked for.`,
      `The card has ${mib(cache.limit - cache.reserved)} MiB left.`,
      `${mib(cache.reserved - cache.allocated)} MiB are reserved and free, but the largest hole ` +
        `has ${mib(largestHole(cache))} MiB. The cache was emptied first: that was not enough.`,
    ];
  }
  if (event.empty) {
    return [
      `${mib(returned)} MiB went back to the driver: only segments, or whole pieces of them, ` +
        "without a tensor can go.",
    ];
  }
  if (event.new?.length !== 1) {
    return event.free?.length ? ["Freed bytes stay reserved, for later requests."] : [];
  }
  const words = [
    how.hole
      ? `The request took a hole of ${mib(how.hole)} MiB.`
      : "No hole was large enough, so the driver was asked; " +
        `reserved changed by ${mib(how.grown)} MiB.`,
  ];
  if (how.retried) words.push("The driver had too little at first, so the cache was emptied.");
  const [[, asked]] = event.new;
  if (how.size !== asked) words.push(`The request was rounded up to ${how.size} bytes.`);
  return words;
}

export function mount(root, data) {
  const { story } = data;
  const state = { limit: 200, expandable: false };
  let events = [];
  let nextNumber = 0;
  const replayed = (expandable, more = []) =>
    replay([...events, ...more], state.limit * MIB, expandable);
  const storyLength = () => events.filter((event) => event.story).length;
  const add = (event) => {
    events.push(event);
    show();
  };
  const numbered = (sizes) => sizes.map((mibs) => [nextNumber++, Math.ceil(mibs * MIB)]);

  function request(size) {
    if (size > 0 && size <= LARGEST_REQUEST)
      add({ say: `${short(size)} MiB`, new: numbered([size]) });
    else showNext();
  }

  function freeEverySecond() {
    const free = [...replayed(state.expandable).tensors.keys()].filter((_, i) => i % 2 === 0);
    add({ say: "every second tensor freed", free });
  }

  function reset() {
    events = [];
    nextNumber = 0;
  }

  function tell() {
    if (storyLength() === 0 || storyLength() === story.length) reset();
    const [say, gone, sizes] = story[storyLength()];
    const told = events.filter((event) => event.story);
    const made = told.flatMap((event) => (event.new ?? []).map(([number]) => number));
    const free = gone.map((i) => made[i]);
    add({ say, free, new: numbered(sizes), empty: say === EMPTY_CACHE, story: true });
  }

  const own = make("input", { type: "number", min: 0.001, max: LARGEST_REQUEST, step: "any" });
  own.value = 50;
  own.oninput = () => showNext();
  const storyButton = button("", tell);
  storyButton.className = "first-choice";
  const limit = slider("the card has", { min: 40, max: 300, step: 10 }, (mibs) => {
    state.limit = mibs;
    show();
  });
  const expandable = tick("expandable segments", (isOn) => {
    state.expandable = isOn;
    show();
  });
  const sentence = make("p", { class: "sentence" });
  const kinds = table(["segments, MiB", "allocated", "reserved", "all holes", "largest hole"]);
  const next = paragraph();
  const maps = make("div");
  const picture = chart("allocated and reserved MiB after each event", { height: 190 });
  const rows = table(["event", "allocated MiB", "reserved MiB"]);

  // A line for each 20 MiB of a segment (2 MiB in the small pool), with the pieces of its blocks.
  function showMaps(cache) {
    const focused = [...maps.querySelectorAll("button")].indexOf(document.activeElement);
    maps.replaceChildren();
    segmentsOf(cache).forEach((blocks, i) => {
      const { pool, address } = blocks[0];
      const total = sum(blocks.map(({ size }) => size));
      const kind = pool === cache.small ? "small pool, drawn larger" : "large pool";
      const label = `segment ${i + 1}: ${mib(total)} MiB, ${kind}`;
      maps.append(make("p", {}, label));
      for (let from = 0; from < total; from += pool.segment) {
        const width = Math.min(pool.segment, total - from);
        const line = make("div", { class: "segment", role: "group", "aria-label": label });
        line.style.width = `${(100 * width) / pool.segment}%`;
        for (const block of blocks) {
          const start = block.address - address - from;
          const [left, right] = [Math.max(start, 0), Math.min(start + block.size, width)];
          if (right > left)
            line.append(piece(block, start >= 0, left / width, (right - left) / width));
        }
        maps.append(line);
      }
    });
    const buttons = maps.querySelectorAll("button");
    if (focused >= 0) (buttons[Math.min(focused, buttons.length - 1)] ?? storyButton).focus();
  }

  // The part of a block that lies in a line.
  function piece(block, isFirst, left, width) {
    const text = width > 0.07 ? (isFirst ? mib(block.size) : "…") : "";
    const free = () => add({ say: `tensor ${block.number} freed`, free: [block.number] });
    const element = block.used ? button(text, free) : make("span", {}, text);
    const title = block.used
      ? `tensor ${block.number}, ${mib(block.size)} MiB: free it`
      : `a hole of ${mib(block.size)} MiB`;
    element.title = title;
    if (block.used) element.setAttribute("aria-label", title);
    Object.assign(element.style, { left: `${100 * left}%`, width: `${100 * width}%` });
    return element;
  }

  function showChart(after) {
    const n = Math.max(after.length, 1);
    const ticks = [0, state.limit].map((x) => [x, x]);
    const title = "events. Blue: allocated; dashed: reserved; ✗: out of memory";
    picture.begin(
      { from: 0, to: n, title },
      { from: 0, to: 1.15 * state.limit, ticks, title: "MiB" },
    );
    const line = (key) =>
      after.flatMap((moment, i) => [
        [i, moment[key] / MIB],
        [i + 1, moment[key] / MIB],
      ]);
    picture.area([[0, 0], ...line("allocated"), [after.length, 0]], { fill: "var(--sky)" });
    picture.line(line("reserved"), { "stroke-width": 2, "stroke-dasharray": "8 3" });
    picture.rule({ y: state.limit }, { stroke: "var(--vermilion)", "stroke-width": 2 });
    picture.text(n, state.limit, "the card", { dy: -5, anchor: "end" });
    after.forEach(({ failed }, i) => {
      if (failed) picture.text(i + 0.5, 0.8 * state.limit, "✗", { anchor: "middle" });
    });
  }

  // What the size in the field would meet, if it were requested now.
  function showNext() {
    const isAllowed = own.valueAsNumber > 0 && own.valueAsNumber <= LARGEST_REQUEST;
    own.setAttribute("aria-invalid", !isAllowed);
    if (!isAllowed) {
      next.textContent = `A request is more than 0 and at most ${LARGEST_REQUEST} MiB, as 0.5.`;
      return;
    }
    const bytes = Math.ceil(own.valueAsNumber * MIB);
    const before = replayed(state.expandable).cache;
    const { cache, after } = replayed(state.expandable, [{ new: [[-1, bytes]] }]);
    const { how, failed } = after.at(-1);
    const answer = how.hole
      ? `would take a hole of ${mib(how.hole)} MiB.`
      : `would find no hole that is large enough. ${mib(before.reserved - before.allocated)} MiB ` +
        `are free, but reserved would go from ${mib(before.reserved)} to ${mib(cache.reserved)} MiB` +
        (how.retried ? ", after the cache is emptied." : ".");
    const verdict = failed ? "would run out of memory." : answer;
    next.textContent = `A request of ${mib(bytes)} MiB now ${verdict}`;
  }

  function show() {
    const both = [replayed(false), replayed(true)];
    const { cache, after } = both[Number(state.expandable)];
    limit.show(state.limit, `${state.limit} MiB`);
    expandable.show(state.expandable);
    const isFirst = storyLength() % story.length === 0;
    storyButton.textContent = `▶ ${isFirst ? "story of notebook 04" : "next event of the story"}`;
    const last = events.at(-1);
    sentence.classList.toggle("oom", Boolean(after.at(-1)?.failed));
    sentence.textContent = last
      ? [`Event ${events.length}: ${last.say}.`, ...happened(last, after.at(-1), cache)].join(" ")
      : "Nothing is reserved yet. Request a tensor, or begin the story of notebook 04.";
    const rowOf = ({ cache }) => [
      cache.expandable ? "expandable" : "fixed",
      mib(cache.allocated),
      mib(cache.reserved),
      mib(cache.reserved - cache.allocated),
      mib(largestHole(cache)),
    ];
    kinds.show(both.map(rowOf), (i) => i === Number(state.expandable));
    showNext();
    showMaps(cache);
    showChart(after);
    rows.show(
      after.map(({ allocated, reserved, failed }, i) => {
        const name = `${i + 1}: ${events[i].say}${failed ? ": out of memory" : ""}`;
        return [name, mib(allocated), mib(reserved)];
      }),
    );
  }

  const sizes = [3, 20, 1].flatMap((mibs) => [button(`${mibs} MiB`, () => request(mibs)), " "]);
  const undo = () => {
    events.pop();
    show();
  };
  const clear = () => {
    reset();
    show();
  };
  const controls = [
    paragraph(
      storyButton,
      " or request ",
      ...sizes,
      make("label", {}, "or MiB ", own),
      button("Request", () => request(own.valueAsNumber)),
    ),
    paragraph(
      button("Free every second tensor", freeEverySecond),
      " ",
      button("empty_cache()", () => add({ say: EMPTY_CACHE, empty: true })),
      " ",
      button("Undo", undo),
      " ",
      button("Start again", clear),
    ),
    paragraph(limit.element, expandable.element),
  ];
  layout(root, data.say, {
    controls,
    picture: [
      sentence,
      maps,
      paragraph("Blue: a tensor; press it to free it. Hatched: a hole, reserved and free."),
    ],
    numbers: [kinds.element, next, picture.svg],
    folded: [
      [
        "Why?",
        "The free pieces lie in five segments, none has more than 3 MiB, and a piece grows only by " +
          "a free neighbour in its own segment. Free two neighbours of a hole, and look.",
      ],
      ["All events as a table", rows.element],
      [
        "How we know",
        "The page follows the rules of PyTorch's allocator with numbers alone. A full line is " +
          "20 MiB, in the small pool 2 MiB. Another card or another kind of segment replays all " +
          "events from the first one.",
      ],
    ],
  });
  for (let i = 0; i < 3; i += 1) tell(); // there holes of 55 MiB have no room for 20
  return () => sentence.textContent;
}
