"""Names for what the log, the validators and the group dump use. Each value lives with its user."""

from taskd.ascend.toolkit import path_validators as paths
from taskd.ascend.toolkit import value_validators as values
from taskd.runtime import log
from taskd.runtime import log_file as logfile

LOG_DEFAULT_BACKUP_COUNT = log.BACKUPS
LOG_DATE_FORMAT = log.DATE_FORMAT
LOG_DEFAULT_MAX_BYTES = log.FILE_LIMIT_BYTES
LOG_SIMPLE_FORMAT = log.FORMAT
LOG_MAX_LINE_LENGTH = log.MESSAGE_LIMIT
LOG_BAK_PRIVILEGE = logfile.BACKUP_MODE
LOG_DIR_PRIVILEGE = logfile.DIRECTORY_MODE
LOG_PRIVILEGE = logfile.FILE_MODE
MAX_FILE_NUMS = paths.MAX_ENTRIES
MAX_SIZE = paths.MAX_FILE_SIZE
MAX_DEVICE_NUM = values.MAX_DEVICES
MAX_RANK_SIZE = values.MAX_RANK

LIB_SO_PATH = "libs"
LIB_SO_NAME = "libtaskd.so"

TASKD_LOG_PATH = "TASKD_LOG_PATH"
TASKD_FILE_LOG_LEVEL = "TASKD_FILE_LOG_LEVEL"
TASKD_STD_LOG_LEVEL = "TASKD_STD_LOG_LEVEL"
TASKD_LOG_STDOUT = "TASKD_LOG_STDOUT"
LOG_DEFAULT_FILE_PATH = "./taskd_log/"
LOG_DEFAULT_FILE_NAME = "taskd.log"
LOG_DEFAULT_FILE = LOG_DEFAULT_FILE_PATH + LOG_DEFAULT_FILE_NAME

MIN_RANK_SIZE = 0
MIN_DEVICE_NUM = 1
MIN_SIZE = 0

PYTORCH = "pytorch"
MINDSPORE = "mindspore"

JOB_ID_KEY = "MINDX_TASK_ID"
GROUP_BASE_DIR_ENV = "GROUP_BASE_DIR"
DEFAULT_GROUP_DIR = "/user/cluster-info/profiling"
PROFILING_DIR_MODE = 0o755
GROUP_INFO_NAME = "parallel_group.json"
GROUP_NAME_KEY = "group_name"
GROUP_RANK_KEY = "group_rank"
GLOBAL_RANKS_KEY = "global_ranks"
DEFAULT_GROUP = "default_group"
