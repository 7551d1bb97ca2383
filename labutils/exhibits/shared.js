(() => {
  "use strict";
  const name = "NAME", markup = "MARKUP", style = "STYLE", data = "DATA";
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
  };
  const mount = /* MOUNT */;
  for (const root of document.querySelectorAll(`[data-exhibit="${name}"]:not([data-live])`)) {
    root.setAttribute("data-live", "");
    root.innerHTML = `<style>${style}</style>${markup}`;
    root.exhibit = mount(root, data, tools);
  }
})();
