// Figures as people read them.

/** "512 B", "3.1 MiB". @param {number} bytes */
export function bytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(bytes) : short(bytes)} ${units[unit]}`;
}

/** Three digits where there are as many: "0.42", "8.3", "120". @param {number} value */
export function short(value) {
  if (value >= 100) return count(value);
  return value.toFixed(value >= 10 ? 1 : 2).replace(/\.?0+$/, "");
}

/** "1,024". @param {number} value */
export function count(value) {
  return Math.round(value).toLocaleString("en-US");
}

/** "one slot", "2 slots". @param {number} value @param {string} noun */
export function counted(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** "87 %", "99.6 %". @param {number} share 0 to 1 */
export function percent(share) {
  const value = share * 100;
  // Only all is 100 %, only nothing is 0 %.
  const digits = value > 0 && value < 100 && (value > 99 || value < 1) ? 1 : 0;
  return `${digits ? Math.min(Math.max(value, 0.1), 99.9).toFixed(1) : value.toFixed(0)} %`;
}

/** "340 ms", "1.2 s", "2 min 5 s". @param {number} milliseconds */
export function duration(milliseconds) {
  if (milliseconds < 1000) return `${short(milliseconds)} ms`;
  const seconds = milliseconds / 1000;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}
