(() => {
  "use strict";
  const name = "NAME", markup = "MARKUP", style = "STYLE", data = "DATA";
  const view = new DataView(new ArrayBuffer(8));
  const tools = {
    // The element with this data-part.
    part: (root, part) => root.querySelector(`[data-part="${part}"]`),
    // A new element: its tag, attributes, and children (elements or texts).
    make(tag, attributes = {}, ...children) {
      const element = document.createElement(tag);
      for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
      element.append(...children);
      return element;
    },
    // A new element inside an SVG.
    draw(svg, tag, attributes = {}, text = "") {
      const element = document.createElementNS(svg.namespaceURI, tag);
      for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
      element.textContent = text;
      svg.append(element);
      return element;
    },
    // A number with at most `digits` significant digits.
    short: (x, digits = 4) => Number.isFinite(x) ? String(Number(x.toPrecision(digits)))
      : Number.isNaN(x) ? "NaN" : x > 0 ? "inf" : "-inf",
    // The smallest positive number of a format.
    smallest: (format) => 2 ** (1 - format.bias - format.mantissa),
    // The power of two at or below a positive number, from its own bits. That of 0 is below all.
    exponentOf(size) {
      view.setFloat64(0, size);
      return (view.getUint16(0) >> 4) - 1023;
    },
    // The number that a format stores: the nearest, and of two equally near the even one.
    round(x, format) {
      if (Number.isNaN(x)) return x;
      if (format.exponent === 8 && format.mantissa === 23) return Math.fround(x); // FP32: built in
      const beyond = Math.sign(x) * (format.saturates ? format.max : format.has_inf ? Infinity : NaN);
      if (!Number.isFinite(x)) return beyond;
      const size = Math.abs(x);
      const spacing = Math.max(2 ** (tools.exponentOf(size) - format.mantissa), tools.smallest(format));
      const steps = size / spacing; // a division by a power of two is exact
      let n = Math.floor(steps);
      const rest = steps - n;
      if (rest > 0.5 || (rest === 0.5 && n % 2 === 1)) n += 1;
      const stored = n * spacing;
      if (stored > format.max) return beyond;
      return x < 0 || Object.is(x, -0) ? -stored : stored;
    },
  };
  const mount = /* MOUNT */;
  for (const root of document.querySelectorAll(`[data-exhibit="${name}"]:not([data-live])`)) {
    root.setAttribute("data-live", "");
    root.innerHTML = `<style>${style}</style>${markup}`;
    root.exhibit = mount(root, data, tools);
  }
})();
