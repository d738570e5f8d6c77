//! What helps where an image's objects cannot be made again on the devices that are here.

use kedge_cuda_types::CuError;
use kedge_gpu_image::{SavedObject, SavedProxy};

/// What is another process's, and opened again.
const OF_OTHERS: [&str; 2] = ["PeerOpen", "EventOpen"];

const GONE: &str = "; the proxy of another process, whose it is, has ended or does not answer";

const ANOTHER_NUMBER: &str = "; the driver does not give a texture or surface object the number by which the program \
    knows it: restart on devices of the kind where it was made, or have the program destroy it before the checkpoint";

/// Words that follow the error; none where nothing is known to help. `what` was to be made.
/// `driver`: the version here.
pub(crate) fn of(what: &str, error: CuError, saved: &SavedProxy, driver: u32) -> String {
    match error {
        _ if OF_OTHERS.contains(&what) => GONE.to_owned(),
        // The descriptor does not come.
        CuError::OPERATING_SYSTEM if what == "HandleImport" => GONE.to_owned(),
        CuError::INVALID_HANDLE if what == "TextureCreate" => ANOTHER_NUMBER.to_owned(),
        CuError::OUT_OF_MEMORY => {
            let on_devices = saved.objects.iter().filter(|(_, object)| is_on_devices(object));
            no_room(on_devices.map(|(_, object)| object.bytes()).sum())
        }
        _ => older(saved.driver_version, driver).unwrap_or_default(),
    }
}

fn is_on_devices(object: &SavedObject) -> bool {
    !matches!(object, SavedObject::Image { .. } | SavedObject::Arena { .. })
}

fn no_room(bytes: u64) -> String {
    let mib = bytes.div_ceil(1 << 20);
    format!(
        "; the image has {mib} MiB on its devices, for which there is not the room: free some, or choose other devices by --gpu"
    )
}

/// As CUDA counts versions: 12040 is 12.4.
fn older(was: u32, here: u32) -> Option<String> {
    let text = |version: u32| format!("{}.{}", version / 1000, version % 1000 / 10);
    (here < was).then(|| {
        let (was, here) = (text(was), text(here));
        format!(
            "; the driver is older here (CUDA {here}) than where the image was made (CUDA {was}): update it, or restart elsewhere"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_driver_is_named() {
        assert_eq!(older(13000, 13000), None);
        assert_eq!(older(12080, 13000), None);
        let said = older(13000, 12080).unwrap();
        assert!(said.contains("CUDA 12.8") && said.contains("CUDA 13.0"), "{said}");
        assert!(no_room(5 << 20).contains(" 5 MiB"));
    }
}
