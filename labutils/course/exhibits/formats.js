// Formats of numbers, and how they round.

// All that follows from the two numbers of bits. Without inf, its bit patterns are numbers.
export function describe(exponent, mantissa, has_inf) {
  const bias = 2 ** (exponent - 1) - 1;
  const fraction = has_inf ? 2 - 2 ** -mantissa : 2 - 2 ** (1 - mantissa);
  const max = fraction * 2 ** (has_inf ? bias : bias + 1);
  const min_normal = 2 ** (1 - bias);
  const min_subnormal = 2 ** (1 - bias - mantissa);
  const span = Math.log2(max) - Math.log2(min_subnormal);
  const eps = 2 ** -mantissa;
  return { exponent, mantissa, has_inf, bias, max, min_normal, min_subnormal, eps, span };
}

// A format as Python describes it, with all that follows.
export const completed = (format) => ({
  ...format,
  ...describe(format.exponent, format.mantissa, format.has_inf),
});

const bits = new DataView(new ArrayBuffer(8));

// The power of two at or below a positive number, from its own bits. That of 0 is below all.
export function exponentOf(size) {
  bits.setFloat64(0, size);
  return (bits.getUint16(0) >> 4) - 1023;
}

// 2^-1200 to 2^1200: a power is taken for each number that is rounded.
const POWERS = Array.from({ length: 2401 }, (_, i) => 2 ** (i - 1200));

// The number that a `completed` format stores: the nearest, and of two equally near the even one.
export function round(x, format) {
  if (Number.isNaN(x)) return x;
  // FP32: built in
  if (format.exponent === 8 && format.mantissa === 23) return Math.fround(x);
  const size = Math.abs(x);
  const spacing = Math.max(POWERS[exponentOf(size) - format.mantissa + 1200], format.min_subnormal);
  // a division by a power of two is exact
  const steps = size / spacing;
  let n = Math.floor(steps);
  const rest = steps - n;
  if (rest > 0.5 || (rest === 0.5 && n % 2 === 1)) n += 1;
  const stored = size === Infinity ? size : n * spacing;
  if (stored <= format.max) return x < 0 || Object.is(x, -0) ? -stored : stored;
  return Math.sign(x) * (format.saturates ? format.max : format.has_inf ? Infinity : NaN);
}
