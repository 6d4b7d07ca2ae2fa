//! The machine an experiment ran on, and the program that ran it: what a reader must know to make sense
//! of a number.

use std::collections::BTreeSet;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Facts about machine and program. What the system does not tell is absent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Processor model.
    pub cpu: Option<String>,
    /// Processors online.
    pub cpus_online: usize,
    /// Processors this process may use.
    pub cpus_allowed: Vec<usize>,
    /// Processors that share a core, as the kernel lists them: `0-1` or `0,4`.
    pub cores: Vec<String>,
    /// Caches of the first processor, `L1 data 48K` for example.
    pub caches: Vec<String>,
    /// Whether the processor says that it is virtual.
    pub virtual_machine: bool,
    /// Kernel name, release, architecture.
    pub kernel: String,
    /// Main memory in bytes.
    pub memory_bytes: u64,
    /// The frequency governor, if there is one to see.
    pub governor: Option<String>,
    /// Load average over 1, 5 and 15 minutes before measuring began.
    pub load_average: Option<[f64; 3]>,
    /// Version of ringferry.
    pub ringferry: String,
    /// The commit it was built from, if the build said so (`RINGFERRY_COMMIT` in its environment).
    pub commit: Option<String>,
    /// `release`, or `debug` for a build whose figures mean little.
    pub build: String,
}

impl Machine {
    /// This machine, now.
    pub fn here() -> Self {
        let name = rustix::system::uname();
        let text = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
        let cpu_info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |wanted: &str| {
            let mut lines = cpu_info.lines().filter_map(|line| line.split_once(':'));
            lines.find(|(key, _)| key.trim() == wanted).map(|(_, value)| value.trim().to_owned())
        };
        let info = rustix::system::sysinfo();
        Self {
            cpu: field("model name"),
            cpus_online: cpu_info.lines().filter(|line| line.starts_with("processor")).count(),
            cpus_allowed: ringferry_sys::cpu::allowed().unwrap_or_default(),
            cores: cores(),
            caches: caches(),
            virtual_machine: field("flags")
                .is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
            kernel: format!("{} {} {}", text(name.sysname()), text(name.release()), text(name.machine())),
            memory_bytes: info.totalram as u64 * u64::from(info.mem_unit),
            governor: line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            load_average: line("/proc/loadavg").and_then(|text| {
                let mut numbers = text.split(' ').map(str::parse);
                Some([numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?])
            }),
            ringferry: env!("CARGO_PKG_VERSION").into(),
            commit: option_env!("RINGFERRY_COMMIT").map(Into::into),
            build: if cfg!(debug_assertions) { "debug" } else { "release" }.into(),
        }
    }

    /// Names and values for people, in the order they are shown.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let known = |value: &Option<String>| value.clone().unwrap_or_else(|| "unknown".into());
        let list = |values: &[String]| if values.is_empty() { "unknown".into() } else { values.join(", ") };
        let allowed: Vec<String> = self.cpus_allowed.iter().map(ToString::to_string).collect();
        let load = self.load_average.map(|load| load.map(|value| format!("{value:.2}")).join(" "));
        vec![
            ("processor", known(&self.cpu)),
            ("processors", format!("{} online, allowed: {}", self.cpus_online, allowed.join(" "))),
            ("cores", list(&self.cores)),
            ("caches", list(&self.caches)),
            ("virtual machine", if self.virtual_machine { "yes" } else { "no" }.into()),
            ("memory", format!("{:.1} GiB", self.memory_bytes as f64 / f64::from(1 << 30))),
            ("kernel", self.kernel.clone()),
            ("governor", self.governor.clone().unwrap_or_else(|| "none visible".into())),
            ("load at start", known(&load)),
            ("ringferry", format!("{} {} build, commit {}", self.ringferry, self.build, known(&self.commit))),
        ]
    }
}

/// The first line of a file, if it can be read.
fn line(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()?.lines().next().map(|line| line.trim().to_owned())
}

fn cores() -> Vec<String> {
    let cpus = fs::read_dir("/sys/devices/system/cpu").into_iter().flatten().flatten();
    let siblings = cpus.filter_map(|cpu| line(cpu.path().join("topology/thread_siblings_list").to_str()?));
    siblings.collect::<BTreeSet<_>>().into_iter().collect()
}

fn caches() -> Vec<String> {
    let cache = |index: usize| {
        let part = |name| line(&format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{name}"));
        let kind = match part("type")?.as_str() {
            "Unified" => String::new(),
            kind => format!(" {}", kind.to_lowercase()),
        };
        Some(format!("L{}{kind} {}", part("level")?, part("size")?))
    };
    (0..8).map_while(cache).collect()
}

/// The time now, RFC 3339, UTC, whole seconds.
pub fn now() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    rfc3339(seconds)
}

fn rfc3339(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years that begin with March put the leap day at their end. 719 468 days lie between the first of
    // March of year 0 and the epoch; 146 097 days make 400 years.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = era * 400 + year + carry;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_described() {
        let machine = Machine::here();
        assert!(machine.cpus_online >= 1 && !machine.cpus_allowed.is_empty());
        assert!(machine.memory_bytes > 1 << 20 && machine.kernel.starts_with("Linux "));
        assert!(machine.facts().iter().all(|(name, value)| !name.is_empty() && !value.is_empty()));
        let json = serde_json::to_string(&machine).unwrap();
        assert_eq!(serde_json::from_str::<Machine>(&json).unwrap(), machine);
    }

    #[test]
    fn dates_are_those_of_date() {
        // `date -u -d @N +%FT%TZ`
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_868_799, "2000-02-29T23:59:59Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(seconds), text);
        }
    }
}
