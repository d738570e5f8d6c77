//! What is known of software devices, as NVML's functions tell it.

use super::places;
use crate::backend::{BackendConfig, soft_config};
use kedge_cuda_types::attribute as a;
use kedge_protocol::DeviceInfo;
use kedge_protocol::management::status::{
    INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, SUCCESS, VERSION_MISMATCH,
};
use kedge_protocol::management::{Answer, Argument, Function, INIT, Kind, function};
use kedge_wire::{Bytes, List};

/// The driver release to which the software device's CUDA version belongs.
const DRIVER_VERSION: &str = "580.0";
const DRIVER_BRANCH: &str = "r580_00";
const NVML_VERSION: &str = "13.580.0";
/// nvmlDeviceArchitecture_t: Hopper, as the compute capability says.
const HOPPER: u32 = 9;

/// nvmlAffinityScope_t: the wider one of two.
const SOCKET: u64 = 1;

/// NVML_STRUCT_VERSION(Memory, 2): version, total, reserved, free, used.
const MEMORY_V2: u32 = 40 | 2 << 24;
/// nvmlSystemDriverBranchInfo_v1: version, 80 characters.
const BRANCH_V1: u32 = 84 | 1 << 24;

/// The job's devices, in its order.
pub(super) struct Devices {
    infos: Vec<DeviceInfo>,
    /// As cuDriverGetVersion answers.
    cuda_version: u32,
}

type Told = Result<Vec<Vec<u8>>, u32>;

fn word(value: u32) -> Told {
    Ok(vec![value.to_le_bytes().to_vec()])
}

impl Devices {
    pub(super) fn of(config: &BackendConfig, devices: u32) -> Devices {
        let infos = soft_config(config, devices).describe();
        Devices { infos, cuda_version: kedge_device_soft::device::DRIVER_VERSION }
    }

    pub(super) fn ask(&self, name: &str, arguments: &[Argument]) -> Answer {
        let told = match function(name) {
            Some(row) if row.takes(arguments) => self.tell(row, &Given(row, arguments)),
            _ => Err(INVALID_ARGUMENT),
        };
        let results = told.and_then(|told| {
            let bytes =
                told.into_iter().map(|bytes| Bytes::new(bytes).map_err(|_| INSUFFICIENT_SIZE));
            let bytes = bytes.collect::<Result<Vec<_>, u32>>()?;
            List::new(bytes).map_err(|_| INSUFFICIENT_SIZE)
        });
        results.map_or_else(Answer::of, |results| Answer { status: SUCCESS, results })
    }

    /// Each result, in the table's order; what no software device has is not supported.
    fn tell(&self, row: &Function, given: &Given<'_>) -> Told {
        // Whoever asks of a device that there is not hears that first.
        let device = given.device(0).map(|at| self.info(at)).transpose()?;
        if row.name == INIT.name {
            return Ok(Vec::new());
        }
        let Some((at, info)) = device else { return self.tell_of_all(row.name, given) };
        match row.name {
            "nvmlDeviceGetIndex" | "nvmlDeviceGetMinorNumber" => word(at as u32),
            "nvmlDeviceGetName" => given.text(1, &info.name),
            "nvmlDeviceGetUUID" => given.text(1, &uuid_text(&info.uuid)),
            "nvmlDeviceGetPciInfo_v3" => Ok(vec![pci_info(info)]),
            // Each process has all of a software device for itself: what others use is not missing
            // here.
            "nvmlDeviceGetMemoryInfo" => {
                Ok(vec![words(&[info.total_memory, info.total_memory, 0])])
            }
            "nvmlDeviceGetMemoryInfo_v2" => {
                if given.version(1) != Some(MEMORY_V2) {
                    return Err(VERSION_MISMATCH);
                }
                let (version, total) = (u64::from(MEMORY_V2), info.total_memory);
                Ok(vec![words(&[version, total, 0, total, 0])])
            }
            "nvmlDeviceGetCudaComputeCapability" => {
                let parts = [a::COMPUTE_CAPABILITY_MAJOR, a::COMPUTE_CAPABILITY_MINOR];
                Ok(parts.map(|part| attribute(info, part).to_le_bytes().to_vec()).to_vec())
            }
            "nvmlDeviceGetArchitecture" => word(HOPPER),
            "nvmlDeviceGetComputeMode" | "nvmlDeviceIsMigDeviceHandle" => word(0),
            "nvmlDeviceGetCpuAffinity" | "nvmlDeviceGetCpuAffinityWithinScope" => {
                given.mask(1, &places::processors())
            }
            "nvmlDeviceGetMemoryAffinity" => given.mask(1, &places::nodes()),
            "nvmlDeviceGetP2PStatus" => {
                self.info(given.device(1).unwrap_or(u64::MAX))?;
                // NVML_P2P_STATUS_OK: one memory holds them all.
                word(0)
            }
            _ => Err(NOT_SUPPORTED),
        }
    }

    /// What is not asked of one device.
    fn tell_of_all(&self, name: &str, given: &Given<'_>) -> Told {
        match name {
            "nvmlSystemGetDriverVersion" => given.text(0, DRIVER_VERSION),
            "nvmlSystemGetDriverBranch" => {
                if given.version(0) != Some(BRANCH_V1) {
                    return Err(VERSION_MISMATCH);
                }
                if given.number(1) <= DRIVER_BRANCH.len() as u64 {
                    return Err(INSUFFICIENT_SIZE);
                }
                let mut info = BRANCH_V1.to_le_bytes().to_vec();
                info.extend(DRIVER_BRANCH.as_bytes());
                info.resize((BRANCH_V1 & 0xff_ffff) as usize, 0);
                Ok(vec![info])
            }
            "nvmlSystemGetNVMLVersion" => given.text(0, NVML_VERSION),
            "nvmlSystemGetCudaDriverVersion" | "nvmlSystemGetCudaDriverVersion_v2" => {
                word(self.cuda_version)
            }
            "nvmlDeviceGetCount" | "nvmlDeviceGetCount_v2" => word(self.infos.len() as u32),
            "nvmlDeviceGetHandleByIndex" | "nvmlDeviceGetHandleByIndex_v2" => {
                word(self.info(given.number(0))?.0 as u32)
            }
            "nvmlDeviceGetHandleByPciBusId" | "nvmlDeviceGetHandleByPciBusId_v2" => {
                let wanted = DeviceInfo::parse_pci(given.name(0)).ok_or(INVALID_ARGUMENT)?;
                self.find(|info| info.pci == wanted)
            }
            "nvmlDeviceGetHandleByUUID" => self.find(|info| uuid_text(&info.uuid) == given.name(0)),
            _ => Err(NOT_SUPPORTED),
        }
    }

    fn info(&self, at: u64) -> Result<(usize, &DeviceInfo), u32> {
        let index = usize::try_from(at).ok();
        let info = index.and_then(|index| Some((index, self.infos.get(index)?)));
        info.ok_or(INVALID_ARGUMENT)
    }

    /// The device of which `wanted` holds.
    fn find(&self, wanted: impl Fn(&DeviceInfo) -> bool) -> Told {
        word(self.infos.iter().position(wanted).ok_or(NOT_FOUND)? as u32)
    }
}

/// What a function was asked with; it takes these arguments.
struct Given<'a>(&'a Function, &'a [Argument]);

impl Given<'_> {
    fn number(&self, at: usize) -> u64 {
        match self.1.get(at) {
            Some(Argument::Number { value }) => *value,
            _ => 0,
        }
    }

    fn bytes(&self, at: usize) -> &[u8] {
        match self.1.get(at) {
            Some(Argument::Bytes { bytes }) => bytes,
            _ => &[],
        }
    }

    fn name(&self, at: usize) -> &str {
        std::str::from_utf8(self.bytes(at)).unwrap_or_default()
    }

    fn version(&self, at: usize) -> Option<u32> {
        self.bytes(at).first_chunk().map(|word| u32::from_le_bytes(*word))
    }

    /// The device there, if there is to be one.
    fn device(&self, at: usize) -> Option<u64> {
        (self.0.kinds.get(at) == Some(&Kind::Device)).then(|| self.number(at))
    }

    /// A mask in as many words as are said there, for a scope that there is.
    fn mask(&self, at: usize, places: &[usize]) -> Told {
        match (self.number(at), self.number(at + 1)) {
            (0, _) => Err(INVALID_ARGUMENT),
            (_, scope) if scope > SOCKET => Err(INVALID_ARGUMENT),
            (count, _) => Ok(vec![places::mask(places, count)]),
        }
    }

    /// Text and its NUL, where there is room for both.
    fn text(&self, at: usize, text: &str) -> Told {
        if text.len() as u64 >= self.number(at) {
            return Err(INSUFFICIENT_SIZE);
        }
        Ok(vec![[text.as_bytes(), &[0]].concat()])
    }
}

fn words(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn attribute(info: &DeviceInfo, id: u32) -> i32 {
    info.attributes.iter().find(|(known, _)| *known == id).map_or(0, |(_, value)| *value)
}

/// nvmlPciInfo_t: the address as text of 16, three numbers, two identifiers, the address as text of
/// 32.
fn pci_info(info: &DeviceInfo) -> Vec<u8> {
    let text = |digits, room| {
        let mut text = bus_text(info, digits).into_bytes();
        text.resize(room, 0);
        text
    };
    let numbers = info.pci.into_iter().chain([0, 0]).flat_map(i32::to_le_bytes).collect();
    [text(4, 16), numbers, text(8, 32)].concat()
}

/// "GPU-6b656467-652d-736f-6674-000000000000".
fn uuid_text(uuid: &[u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// "00006B64:01:00.0", with a domain of `digits`.
fn bus_text(info: &DeviceInfo, digits: usize) -> String {
    let [domain, bus, device] = info.pci;
    format!("{domain:0digits$X}:{bus:02X}:{device:02X}.0")
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_device_nvidia::CacheLimits;

    #[test]
    fn names_read_as_nvml_writes_them() {
        let uuid = *b"kedge-soft\0\0\0\0\0\x01";
        assert_eq!(uuid_text(&uuid), "GPU-6b656467-652d-736f-6674-000000000001");
        assert_eq!(DeviceInfo::parse_pci("00006B64:01:00.0"), Some([0x6b64, 1, 0]));
        assert_eq!(DeviceInfo::parse_pci("6b64:1:0"), Some([0x6b64, 1, 0]));
        assert_eq!(DeviceInfo::parse_pci("01:00.0"), Some([0, 1, 0]));
        assert!(
            ["", "1", "0:1:2.1", "x:1:0", "0:1:2:3"]
                .iter()
                .all(|bad| DeviceInfo::parse_pci(bad).is_none())
        );
    }

    const BRANCH: &str = "nvmlSystemGetDriverBranch";

    fn version_of(name: &str) -> u32 {
        if name == BRANCH { BRANCH_V1 } else { MEMORY_V2 }
    }

    /// A result for each that the table wants, and of its size.
    #[test]
    fn what_is_told_is_what_the_table_says() {
        let gpu = "soft:2".parse().unwrap();
        let cache = CacheLimits::default();
        let config = BackendConfig {
            gpu,
            windows: None,
            soft_memory: Some(1 << 30),
            gpu_memory: None,
            workers: None,
            cache,
            check: None,
        };
        let devices = Devices::of(&config, 2);
        let mut answered = 0;
        for row in kedge_protocol::management::FUNCTIONS {
            let argument = |kind: &Kind| match kind {
                Kind::Name => Argument::Bytes { bytes: Bytes::new(b"01:00.0".to_vec()).unwrap() },
                Kind::Versioned => {
                    let mut bytes = version_of(row.name).to_le_bytes().to_vec();
                    bytes.resize((version_of(row.name) & 0xff_ffff) as usize, 0);
                    Argument::Bytes { bytes: Bytes::new(bytes).unwrap() }
                }
                Kind::Fields(_) => Argument::Bytes { bytes: Bytes::default() },
                Kind::Room => Argument::Number { value: 96 },
                Kind::Number if row.name == BRANCH => Argument::Number { value: 80 },
                _ => Argument::Number { value: 1 },
            };
            let arguments: Vec<Argument> = row.kinds.iter().map(argument).collect();
            let answer = devices.ask(row.name, &arguments);
            assert!([0, NOT_SUPPORTED, NOT_FOUND].contains(&answer.status), "{}", row.name);
            if answer.status != 0 {
                continue;
            }
            answered += 1;
            let wanted: Vec<&Kind> = row.kinds.iter().filter(|kind| kind.has_result()).collect();
            assert_eq!(wanted.len(), answer.results.len(), "{}", row.name);
            for (kind, result) in wanted.into_iter().zip(answer.results.iter()) {
                match kind {
                    Kind::Out(size) => assert_eq!(result.len(), *size as usize, "{}", row.name),
                    Kind::Handle => assert_eq!(result.len(), 4, "{}", row.name),
                    Kind::Room => assert_eq!(result.last(), Some(&0), "{}", row.name),
                    Kind::Array(size) => assert_eq!(result.len(), *size as usize, "{}", row.name),
                    _ => {
                        assert_eq!(result.len() as u32, version_of(row.name) & 0xff_ffff);
                        let version = version_of(row.name).to_le_bytes();
                        assert!(result.starts_with(&version), "{}", row.name);
                    }
                }
            }
        }
        assert!(answered >= 21, "{answered}");
        assert_eq!(devices.ask("nvmlDeviceGetName", &[]).status, INVALID_ARGUMENT);
        let affinity = |words: u64, scope: u64| {
            let arguments = [0, words, scope].map(|value| Argument::Number { value });
            devices.ask("nvmlDeviceGetCpuAffinityWithinScope", &arguments).status
        };
        assert_eq!(
            [(0, 0), (2, 0), (2, 1), (2, 2)].map(|(n, scope)| affinity(n, scope)),
            [INVALID_ARGUMENT, 0, 0, INVALID_ARGUMENT]
        );
        let third = [Argument::Number { value: 2 }, Argument::Number { value: 96 }];
        assert_eq!(devices.ask("nvmlDeviceGetName", &third).status, INVALID_ARGUMENT);
    }
}
